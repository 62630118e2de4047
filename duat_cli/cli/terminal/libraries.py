"""What the libraries below are told before they load: not to talk over duat, and not to take all cores for waiting.

Their logs carry raw foreign strings, and their progress bars cross ours.
"""

from __future__ import annotations

import logging
import os
import warnings

from duat_cli.cli.terminal.talk import Talk

SPINS = "10000"
"""How often a thread of torch looks whether the others are done before it sleeps; libgomp's own are 300,000."""


def wait_asleep() -> None:
    """Have threads that are done with their part of a layer leave their cores to other programs.

    A layer ends with its last thread. Where another program has that one's core, the others spin meanwhile, and it gets
    the core back late: with as many programs beside it as cores, a pass takes ten times as long and more. A user's own
    setting stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def calm(talk: Talk) -> None:
    """Silence logs, warnings and progress bars unless -v asks for them; before transformers loads."""
    if talk.verbose:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
