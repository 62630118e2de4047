"""The rules, one family a file; registry.py finds every file that has a RULES."""
