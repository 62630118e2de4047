"""Room of the devices for weights that are read block by block, beside what the command itself takes."""

from __future__ import annotations

import torch

from duat_cli.analysis.plan.shape import shape_of
from duat_cli.analysis.plan.terms import LIBRARIES
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.model.device_map import DeviceMap, Placed
from duat_cli.loading.model.load import parse_device
from duat_cli.loading.model.memory import memory_limit
from duat_cli.results.plan import Way

_PAGES = 2  # blocks on their way from a file to a GPU: the one that is needed and the next one


def placed(device_map: str, device: str, files: CheckpointFiles, dtype: str, way: Way, memory: int | None) -> Placed:
    """The device map that --device-map and --device ask for, with the room of each device."""
    page = max((block.read for block in shape_of(files, dtype).parts.blocks), default=0)
    return Placed(DeviceMap.of(device_map), room_of(parse_device(device), way, page, memory))


def left_on(device: torch.device | int, memory: int | None) -> int:
    """Bytes that are free on a GPU, at most `memory`, the bytes of `--memory`."""
    left = int(torch.cuda.mem_get_info(device)[0])
    return left if memory is None else min(left, memory)


def room_of(device: torch.device, way: Way, page: int, memory: int | None) -> dict[str, float]:
    """Room in bytes by device. device: the one that computes; way: what computing takes there; page: bytes of the
    largest block as stored; memory: as in `ModelRequest`."""
    gpu = device.type == "cuda"
    whole = memory_limit() if memory is None or gpu else memory
    if not gpu:
        return {"cpu": whole - way.peak_memory_bytes}
    found: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        computes = number == device.index
        left = left_on(number, memory if computes else None)
        found[f"cuda:{number}"] = left - (way.peak_memory_bytes if computes else 0)
    return {**found, "cpu": whole - LIBRARIES - _PAGES * page}
