"""The mathematics: structured operators and their closed forms. Imports torch, and of duat only errors."""
