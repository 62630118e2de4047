"""A drawn picture and a computed tone: the inputs of models of images and sound where the user gives none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duat_cli.errors import InputError
from duat_cli.loading.declared.fields import PROCESSORS
from duat_cli.loading.inputs.files import Home, has_processor, pixels_of, sound_of

RATE = 16_000  # samples a second, which speech models read
TONES = (220.0, 330.0, 495.0)  # Hz, one after the other
SECONDS = 1.5
SIDE = 224  # pixels, where the config does not say


def drawn_picture(config: Any) -> Tensor:
    """A disc, a square and stripes on a gradient, (1, channels, height, width); channels have mean 0 and spread 1."""
    config = getattr(config, "vision_config", config)  # a classifier made from a part of a model (CLIP)
    shape = _shape_of_timm(config)
    side = getattr(config, "image_size", None) or shape[1:]
    height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
    channels = getattr(config, "num_channels", None) or shape[0]
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    disc = ((x + 0.3) ** 2 + (y + 0.2) ** 2 < 0.2).float()
    square = ((x - 0.4).abs().maximum((y - 0.4).abs()) < 0.3).float()
    stripes = torch.sin(9 * math.pi * (x + y)) * (y < -0.5)
    weights = torch.linspace(0.2, 1.0, channels)[:, None, None]
    picture = weights * x + (1 - weights) * y + (1.2 - weights) * disc - weights * square + 0.5 * stripes
    flat = picture.flatten(1)
    spread = flat.std(dim=1).clamp_min(1e-6)[:, None, None]
    return ((picture - flat.mean(dim=1)[:, None, None]) / spread)[None]


def _shape_of_timm(config: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the pictures of a model of timm, as its config states them."""
    stated = getattr(config, "pretrained_cfg", None)
    size = stated.get("input_size") if isinstance(stated, dict) else None
    if isinstance(size, (list, tuple)) and len(size) == 3 and all(isinstance(one, int) and one > 0 for one in size):
        return size[0], size[1], size[2]
    return 3, SIDE, SIDE


def drawn_video(config: Any, frames: int) -> Tensor:
    """The drawn picture moving to the right, (1, frames, channels, height, width)."""
    picture = drawn_picture(config)
    step = max(1, picture.shape[-1] // (2 * frames))  # half of its width in all
    return torch.stack([picture.roll(step * frame, dims=-1) for frame in range(frames)], dim=1)


def drawn_patches(name: str, home: Home, trust_remote_code: bool) -> dict[str, Tensor]:
    """The drawn picture, cut into patches by the checkpoint's image processor; InputError where there is none. name:
    the forward pass's argument for them."""
    if not has_processor(home):
        raise InputError(
            f"it reads patches of a picture as `{name}`, and no {PROCESSORS[0]} says how they are cut; give --inputs"
        )
    picture = drawn_picture(None)[0].permute(1, 2, 0)
    low, high = picture.amin(), picture.amax()
    pixels = (255 * (picture - low) / (high - low)).round().to(torch.uint8).numpy()
    return pixels_of(pixels, "the drawn picture", home, trust_remote_code)


def tone() -> Any:
    """Three tones one after the other with soft edges, float32 (time,), between -1 and 1."""
    count = int(RATE * SECONDS / len(TONES))
    time = np.arange(count) / RATE
    edge = np.minimum(1.0, np.minimum(time, time[::-1]) * 50)
    return np.concatenate([0.5 * edge * np.sin(2 * np.pi * hertz * time) for hertz in TONES]).astype(np.float32)


def default_inputs(name: str, config: Any, home: Home, trust_remote_code: bool) -> dict[str, Tensor]:
    """Inputs for the forward pass's argument of this name; InputError where they cannot be made up."""
    if name == "pixel_values":
        return {name: drawn_picture(config)}
    if has_processor(home):
        return sound_of(tone(), RATE, home, trust_remote_code)
    if name == "input_values" and getattr(config, "conv_stride", None) is not None:  # it reads samples
        samples = torch.from_numpy(tone())
        return {name: ((samples - samples.mean()) / samples.std())[None]}
    if isinstance(home, Path):
        raise InputError(
            f"{home}: it reads `{name}`, and has no {PROCESSORS[0]} that says how to make it; give --inputs FILE"
        )
    raise InputError(f"it reads `{name}`, and no processor was given that says how to make it; give inputs")
