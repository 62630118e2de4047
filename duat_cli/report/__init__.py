"""Results to text. Nothing is computed here."""
