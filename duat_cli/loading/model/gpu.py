"""Which GPU a process takes."""

from __future__ import annotations

from typing import Any

from duat_cli.loading.importing import uncollected

NO_FLOAT64 = "has no float64, which sums and certificates take"


def use_gpu(number: int) -> None:
    """What 'cuda' means from now on. More processes than GPUs share them."""
    cuda = _torch().cuda
    if cuda.is_available():
        cuda.set_device(number % cuda.device_count())


def full_precision() -> None:
    """Convolutions of float32 compute in float32 from now on: cuDNN's keep ten bits of a number otherwise (TF32), less
    than a certificate asks for."""
    _torch().backends.cudnn.allow_tf32 = False


def give_back_gpu_memory(device: str) -> None:
    """What torch keeps to use it again; pieces of another size would stand beside it. Nothing on a CPU."""
    if device.startswith("cuda"):
        _torch().cuda.empty_cache()


def peak_gpu_memory(device: str) -> int | None:
    """The most bytes that this process has had of a GPU, beside the driver's own; None of another device."""
    return int(_torch().cuda.max_memory_reserved(device)) if device.startswith("cuda") else None


def sees_accelerator() -> bool:
    """Whether torch has a device beside the CPU. Gradients start a thread for it even where they are the CPU's, and
    torch computes none in a process that is forked behind them."""
    return bool(_torch().accelerator.is_available())


def lacks_float64(device: Any) -> bool:
    """Whether the device, a `torch.device`, computes no float64, as Apple's GPUs do not."""
    try:
        _torch().empty(1, dtype=_torch().float64, device=device)
    except TypeError:
        return True
    return False


def _torch() -> Any:
    """Imported when it is asked for."""
    with uncollected():
        import torch

    return torch
