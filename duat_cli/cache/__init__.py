"""Results that are kept on disk between runs."""
