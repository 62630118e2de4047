"""What is kept on disk between runs."""
