"""Made-up pictures and sounds of the shape that a tiny model takes: the shapes in use, tried one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duat_cli.zoo.tiny import TinyError, one_line

SIDE = 32  # pixels, where the config does not say
FRAMES = 8  # of a film
STEPS = 64  # of a spectrogram
SAMPLES = 8_000  # of a sound
MOST_PATCHES = 32  # along a side
GRID = 4  # patches along each side, where the model takes patches

Inputs = dict[str, Tensor]


def made_inputs(model: PreTrainedModel, stack: Any, name: str) -> Inputs:
    """Noise that `stack`, the part of the model that is run, takes under `name`; TinyError where no shape fits."""
    config, fault = getattr(stack, "config", model.config), None
    taken = inspect.signature(stack.forward).parameters
    generator = torch.Generator().manual_seed(0)
    for shape, more in _shapes(name, config, set(taken)):
        inputs = {name: torch.randn(shape, generator=generator), **more}
        try:
            with torch.no_grad():
                output = stack(**inputs)[0]
        except Exception as error:
            fault = fault or one_line(error)
            continue
        if isinstance(output, Tensor) and bool(torch.isfinite(output).all()):
            return inputs
    raise TinyError(f"no made-up `{name}` suits it: {fault}")


def _shapes(name: str, config: Any, taken: set[str]) -> Iterator[tuple[tuple[int, ...], Inputs]]:
    """Shapes of the input, and what goes with it."""
    channels = _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    patch = _number(config, "patch_size", otherwise=4)
    if "spatial_shapes" in taken:
        mask = torch.ones(1, GRID * GRID, dtype=torch.long)
        named = next((n for n in ("pixel_attention_mask", "attention_mask") if n in taken), "attention_mask")
        yield (1, GRID * GRID, channels * patch**2), {named: mask, "spatial_shapes": torch.tensor([[GRID, GRID]])}
    grid = next((n for n in ("grid_thw", "image_grid_thw") if n in taken), None)
    if grid is not None:
        depth = _number(config, "temporal_patch_size", otherwise=1)
        yield (GRID * GRID, channels * depth * patch**2), {grid: torch.tensor([[1, GRID, GRID]])}
    if "pixel" in name or "patches" in name or "image" in name:
        side = _number(config, "image_size", "img_size", "input_size", "crop_size", otherwise=SIDE)
        if side > patch * MOST_PATCHES:  # attention over all patches of it would fill the memory
            side = GRID * patch
        frames = _number(config, "num_frames", "frames_per_clip", otherwise=FRAMES)
        yield (1, channels, side, side), {}
        yield (1, frames, channels, side, side), {}
        yield (1, channels, frames, side, side), {}
        yield (1, 1, channels, side, side), {}
        return
    bands = _number(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", otherwise=16)
    positions = _number(config, "max_source_positions", otherwise=STEPS // 2)
    yield (1, bands, 2 * positions), {}
    yield (1, STEPS, bands), {}
    yield (1, _number(config, "max_length", otherwise=STEPS), bands), {}
    yield (1, SAMPLES), {}
    yield (1, 1, SAMPLES), {}


def _number(config: Any, *names: str, otherwise: int) -> int:
    """The first of these fields that is a number, or holds one in front."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return otherwise
