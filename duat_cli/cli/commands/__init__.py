"""One file a command: it parses and prints."""
