"""huggingface_hub: known to work with 1.33 and 2.4."""

from __future__ import annotations


def cache_folder() -> str:
    """Where hub files are kept without --cache-dir; said where a download fails."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
