"""Which GPU a process takes."""

from __future__ import annotations

from duat_cli.loading.importing import uncollected


def use_gpu(number: int) -> None:
    """What 'cuda' means from now on. More processes than GPUs share them."""
    with uncollected():
        from torch import cuda

    if cuda.is_available():
        cuda.set_device(number % cuda.device_count())


def sees_accelerator() -> bool:
    """Whether torch has a device beside the CPU. Gradients start a thread for it even where they are the CPU's, and
    torch computes none in a process that is forked behind them."""
    with uncollected():
        from torch import accelerator

    return accelerator.is_available()
