"""Runs with `--out`, for many prompts and processes: a folder of append-only files with the results of each prompt, and
the report made from them."""
