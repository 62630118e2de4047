"""huggingface_hub: known to work with 1.33 and 2.4."""

from __future__ import annotations


def cache_folder() -> str:
    """The folder of hub files without --cache-dir, for the error of a failed download."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
