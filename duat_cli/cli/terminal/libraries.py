"""Settings of the libraries below, made before they load: no logs or progress bars, and no cores taken for waiting.

Their logs carry raw foreign strings, and their progress bars cross ours.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from duat_cli.cli.terminal.talk import Talk

SPINS = "10000"
"""How often a thread of torch checks whether the others are done before it sleeps; libgomp's default is 300,000."""

PRODUCTS = "128"
"""Number of sizes of half-precision products whose code is kept; each takes 0.6 MB, and 0.6 ms to make. The library's
default is 1,024."""


def wait_asleep() -> None:
    """Makes threads that are done with their part of a layer leave their cores to other programs.

    A layer ends with its last thread. If another program has the core of that thread, the other threads spin meanwhile,
    and the thread gets its core back late: beside as many programs as there are cores, a pass takes over ten times as
    long. A user's own setting stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def keep_few_products() -> None:
    """Makes oneDNN, which multiplies in half precision on a CPU, keep the code of few sizes of product.

    It generates code for every size, and prompts of all lengths and batches of ablations have many sizes: with 150
    prompts of different lengths, `inspect` of 37M parameters took twice the memory. A user's own settings stay.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and torch's in front of it
        os.environ.setdefault(cache, PRODUCTS)


def grow_in_place() -> None:
    """Makes torch take a GPU's memory in segments that can grow and be given back.

    Its default segments are as large as the first request, and the rest beside a tensor of another size stays empty: a
    70B shape that is read block by block took 7.3 GB for 6.6 GB of tensors. A user's own setting stays.
    """
    if sys.platform == "linux" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def calm(talk: Talk) -> None:
    """Silences logs, warnings and progress bars unless -v is given, whether transformers is loaded yet or not."""
    if talk.verbose:
        return
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for library in ("huggingface_hub", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
