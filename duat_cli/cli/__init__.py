"""The command line, with one file for each command; torch and transformers are imported inside command bodies only."""
