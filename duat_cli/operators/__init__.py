"""Structured operators and their closed forms. Imports only torch and duat's errors."""
