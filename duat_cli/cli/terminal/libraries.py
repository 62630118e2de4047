"""What the libraries below are told before they load: not to talk over duat, and not to take all cores for waiting.

Their logs carry raw foreign strings, and their progress bars cross ours.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from duat_cli.cli.terminal.talk import Talk

SPINS = "10000"
"""How often a thread of torch looks whether the others are done before it sleeps; libgomp's own are 300,000."""

PRODUCTS = "128"
"""Sizes of products in half precision whose code is kept; each takes 0.6 MB, and 0.6 ms to make. The library's own are
1,024."""


def wait_asleep() -> None:
    """Have threads that are done with their part of a layer leave their cores to other programs.

    A layer ends with its last thread. Where another program has that one's core, the others spin meanwhile, and it gets
    the core back late: with as many programs beside it as cores, a pass takes ten times as long and more. A user's own
    setting stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def keep_few_products() -> None:
    """Have oneDNN, which multiplies in half precision on a CPU, keep the code of few sizes of product.

    It makes code for every size, and prompts of all lengths and ablations in rows have many: 150 prompts of as many
    lengths took `inspect` of 37M parameters twice the memory. A user's own settings stay.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # its own, and torch's in front of it
        os.environ.setdefault(cache, PRODUCTS)


def grow_in_place() -> None:
    """Have torch take a GPU's memory in pieces that can grow and be given back.

    Its own pieces are as large as what was first asked for, and what is left over beside a tensor of another size stays
    empty: a 70B shape that is read block by block took 7.3 GB for 6.6 GB of tensors. A user's own setting stays.
    """
    if sys.platform == "linux" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def calm(talk: Talk) -> None:
    """Silence logs, warnings and progress bars unless -v asks for them, whether transformers is loaded or will be."""
    if talk.verbose:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for library in ("huggingface_hub", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
