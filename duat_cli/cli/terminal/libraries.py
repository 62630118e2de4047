"""Keep the libraries below from talking over duat.

Their logs carry raw foreign strings, and their progress bars cross ours.
"""

from __future__ import annotations

import logging
import os
import warnings

from duat_cli.cli.terminal.talk import Talk


def calm(talk: Talk) -> None:
    """Silence logs, warnings and progress bars unless -v asks for them; before transformers loads."""
    if talk.verbose:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
