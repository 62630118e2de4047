"""The rules, one family per file; registry.py finds every file that has a RULES."""
