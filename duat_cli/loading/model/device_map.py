"""`--device-map`: which device keeps which weights of a model whose blocks compute one after the other.

One device computes. The others keep weights for it, so that a block is read from their memory instead of its file, and
no number depends on the map. accelerate infers the map. Its `dispatch_model` is not used: it computes every block where
its weights are, so the parts of a sum would lie on several devices, and between two passes its hooks put `meta` tensors
in the place of weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory

from duat_cli.errors import InputError
from duat_cli.loading.checkpoint.files import open_file
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.checkpoint.stored import most_stored
from duat_cli.loading.paged.layout import Page, block_names
from duat_cli.loading.quiet import hushed
from duat_cli.text import clean, listed, one_line, shown

INFERRED = ("auto", "balanced", "sequential")
DISK = "disk"
"""The place of weights that no device keeps; they are read each time their block is to compute."""
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMap:
    """The request of --device-map."""

    given: str
    places: Mapping[str, str] | None
    """Module or parameter -> device, as the file says; None where the map is to be inferred."""

    @classmethod
    def of(cls, given: str) -> DeviceMap:
        """The map that the option names. InputError for an unknown name, a file that is no map, and a device that is
        not there."""
        if given in INFERRED:
            return cls(given, None)
        path = Path(given)
        if not path.is_file():
            raise InputError(f"--device-map {shown(given)}: expected {', '.join(INFERRED)}, or a file; no such file")
        try:
            with open_file(path) as file:
                content = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise InputError(f"--device-map {clean(given)}: no JSON ({one_line(str(error), 100)})") from error
        if not isinstance(content, dict) or not content:
            raise InputError(
                f'--device-map {clean(given)}: expected an object of module names and devices, such as {{"": "cpu"}}'
            )
        return cls(given, {name: _device(given, name, value) for name, value in content.items()})

    def homes(self, model: Any, room: Mapping[str, float], dtype: torch.dtype) -> Callable[[str], str]:
        """A function from a parameter's name to the device that keeps it, or DISK.

        model: on `meta`. room: free bytes of each device. dtype: the one that most weights are stored in.
        """
        places = self._inferred(model, room, dtype) if self.places is None else self._checked(model, self.places)
        return lambda name: places[_nearest(name, places) or ""]

    def require_room(self, kept: Mapping[str, int], room: Mapping[str, float]) -> None:
        """InputError where a device has less room than it is to keep. kept: bytes to keep, by device."""
        for device, size in kept.items():
            left = room.get(device, 0)
            if size > left:
                raise InputError(
                    f"--device-map {clean(self.given)}: {device} is to keep {size / _GIB:.2f} GiB of weights, has "
                    f"{max(0, left) / _GIB:.2f} GiB beside the run; place some on {DISK}"
                )

    def _inferred(self, model: Any, room: Mapping[str, float], dtype: torch.dtype) -> dict[str, str]:
        budget: dict[int | str, int] = {_key(device): max(0, int(size)) for device, size in room.items()}
        whole = sorted({type(model.get_submodule(name)).__name__ for name in block_names(model)})
        with hushed():
            if self.given != "sequential":
                budget = get_balanced_memory(model, budget, no_split_module_classes=whole, dtype=dtype)
            found = infer_auto_device_map(model, budget, no_split_module_classes=whole, dtype=dtype)
        return {name: f"cuda:{device}" if isinstance(device, int) else str(device) for name, device in found.items()}

    def _checked(self, model: Any, places: Mapping[str, str]) -> dict[str, str]:
        """The map, after checks: every name is one of the model's, and every parameter has a place."""
        parameters = [name for name, _ in model.named_parameters()]
        known = {name for name, _ in model.named_modules()} | set(parameters)
        odd = [name for name in places if name not in known]
        if odd:
            raise InputError(
                f"--device-map {clean(self.given)}: {listed(odd)}: no module of {type(model).__name__}; its blocks are "
                f"named like {shown(block_names(model)[0])}"
            )
        missing = [name for name in parameters if _nearest(name, places) is None]
        if missing:
            blocks = block_names(model)
            inside = {next((b for b in blocks if name.startswith(f"{b}.")), name) for name in missing}
            raise InputError(
                f'--device-map {clean(self.given)}: says nothing of {listed(sorted(inside))}; add it, or "" for all '
                "that is not named"
            )
        return dict(places)


@dataclass(frozen=True)
class Placed:
    """A map, and the room on each device."""

    devices: DeviceMap
    room: Mapping[str, float]
    """Free bytes, by device."""

    def homes(
        self, model: Any, pages: Sequence[Page], targets: Mapping[str, tuple[str, bool]], files: CheckpointFiles
    ) -> dict[str, str]:
        """Tensor of the files -> the device that keeps it. Tensors that no device keeps are left out.

        pages: all but the frame, which is always where the model computes. targets: as `layout` takes them.
        """
        home = self.devices.homes(model, self.room, most_stored(files) or model.dtype)
        tensors = [name for page in pages for name in page.tensors]
        found = {name: place for name in tensors if (place := home(targets[name][0])) != DISK}
        sizes: dict[str, int] = {}
        for name, place in found.items():
            sizes[place] = sizes.get(place, 0) + files.tensors[name].read_bytes
        self.devices.require_room(sizes, self.room)
        return found


def _nearest(name: str, places: Mapping[str, str]) -> str | None:
    """The longest name of the map that equals this name or is a module around it."""
    parts = name.split(".")
    around = (".".join(parts[:k]) for k in range(len(parts), -1, -1))
    return next((one for one in around if one in places), None)


def _key(device: str) -> int | str:
    """accelerate's name of the device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else device


def _device(given: str, name: str, value: object) -> str:
    """The full name of a device, which must be able to keep weights."""
    where = f"--device-map {clean(given)}: {shown(name)}: device {shown(value)}"
    if value == DISK:
        return DISK
    try:
        device = torch.device(f"cuda:{value}" if type(value) is int else str(value))
        torch.ones(1, device=device).item()  # 'meta' fails as well: it keeps no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = one_line(str(error).partition("\n")[0], 120)
        raise InputError(f"{where}: not usable here ({reason}); use cpu or {DISK}") from error
    if device.type == "cpu":  # torch may number the CPU as well
        return "cpu"
    return "cuda:0" if str(device) == "cuda" else str(device)
