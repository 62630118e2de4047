"""The commands, one in each file: each parses its options and prints its result."""
