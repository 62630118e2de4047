"""How much the devices can keep of weights that are read block by block, beside what the command itself takes."""

from __future__ import annotations

import math

import torch

from duat_cli.analysis.plan.terms import LIBRARIES
from duat_cli.loading.model.device_map import DeviceMap, Placed
from duat_cli.loading.model.load import parse_device
from duat_cli.loading.model.memory import memory_limit
from duat_cli.results.plan import Way

_PAGES = 2  # blocks on their way from a file to a GPU: the one that is needed and the next one


def placed(device_map: str, device: str, way: Way, page: int, memory: int | None) -> Placed:
    """What --device-map and --device ask for, with the room that there is."""
    return Placed(DeviceMap.of(device_map), room_of(parse_device(device), way, page, memory))


def left_on(device: torch.device, memory: int | None) -> int:
    """Bytes that are left on a GPU. memory: of `--memory`."""
    left = int(torch.cuda.mem_get_info(device)[0])
    return left if memory is None else min(left, memory)


def room_of(device: torch.device, way: Way, page: int, memory: int | None) -> dict[str, float]:
    """Bytes, by device. device: the one that computes; way: what that takes; page: bytes of the largest block, as
    stored; memory: as of `ModelRequest`."""
    limit = memory_limit() if memory is None else memory
    whole = math.inf if limit is None else float(limit)
    if device.type != "cuda":
        return {"cpu": whole - way.peak_memory_bytes}
    found: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        left = float(torch.cuda.mem_get_info(number)[0])
        computes = number == (torch.cuda.current_device() if device.index is None else device.index)
        found[f"cuda:{number}"] = left - (way.peak_memory_bytes if computes else 0)
    return {**found, "cpu": whole - LIBRARIES - _PAGES * page}
