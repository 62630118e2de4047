"""The meaning of every name in duat's output, collected from where it is declared."""
