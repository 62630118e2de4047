"""The command line: one file a command; torch and transformers are imported inside command bodies only."""
