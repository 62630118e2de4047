"""Names of the files in a folder of results, apart from the modules that read them, which load torch."""

from __future__ import annotations

MANIFEST, KEYS, LEADERS = "manifest.json", "prompts.keys", "prompts.batches"
FILES = (MANIFEST, KEYS, LEADERS, "shard-*.jsonl", "null-*.json", "eq18.json", "sets.json")
"""Patterns of the files that are read from such a folder."""
