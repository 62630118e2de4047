"""The structure of any model, found by what its parts do and proved by replay."""
