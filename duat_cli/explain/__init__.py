"""What every name in duat's output means, collected from where it is declared."""
