"""How the files of a folder of results are called; without what reads them, which loads torch."""

from __future__ import annotations

MANIFEST, KEYS, LEADERS = "manifest.json", "prompts.keys", "prompts.batches"
FILES = (MANIFEST, KEYS, LEADERS, "shard-*.jsonl", "null-*.json", "eq18.json", "sets.json")
"""Patterns of what is read of such a folder."""
