"""The mathematics: structured operators and their closed forms. Imports torch and nothing else of duat but errors."""
