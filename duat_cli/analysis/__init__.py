"""One question about a captured model a file."""
