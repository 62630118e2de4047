"""The GPU that a process uses."""

from __future__ import annotations

from typing import Any

from duat_cli.loading.importing import uncollected

NO_FLOAT64 = "has no float64, which sums and certificates take"


def use_gpu(number: int) -> None:
    """Makes 'cuda' mean this GPU from now on. If there are more processes than GPUs, they share them."""
    cuda = _torch().cuda
    if cuda.is_available():
        cuda.set_device(number % cuda.device_count())


def full_precision() -> None:
    """Makes float32 convolutions compute in float32 from now on. By default cuDNN keeps ten bits of a mantissa (TF32),
    too few for a certificate."""
    _torch().backends.cudnn.allow_tf32 = False


def give_back_gpu_memory(device: str) -> None:
    """Returns to the driver the memory that torch keeps for reuse, because tensors of another size would need memory
    beside it. Does nothing on a CPU."""
    if device.startswith("cuda"):
        _torch().cuda.empty_cache()


def peak_gpu_memory(device: str) -> int | None:
    """The most bytes that this process has reserved on a GPU, without the driver's own; None for another device."""
    return int(_torch().cuda.max_memory_reserved(device)) if device.startswith("cuda") else None


def sees_accelerator() -> bool:
    """Whether torch has a device beside the CPU. If so, gradients start a thread for it even on the CPU, and a process
    that is forked after that cannot compute gradients."""
    return bool(_torch().accelerator.is_available())


def lacks_float64(device: Any) -> bool:
    """Whether the device, a `torch.device`, computes no float64, as Apple's GPUs do not."""
    try:
        _torch().empty(1, dtype=_torch().float64, device=device)
    except TypeError:
        return True
    return False


def _torch() -> Any:
    """torch, imported on first use."""
    with uncollected():
        import torch

    return torch
