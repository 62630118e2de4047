"""The kinds of input of a class of models, by the arguments of its forward pass; and made-up pictures and sounds for a
tiny model. Common shapes are tried one after the other."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from duat_cli.compat.torch import is_convolution
from duat_cli.compat.transformers import auto_models
from duat_cli.models.instrument.calls import SmallTensors
from duat_cli.results.support import Modality
from duat_cli.zoo.tiny import TinyError, class_of_config, one_line

SIDES = 64, 128, 224, 32  # pixels, where the config states none, or too many
FRAMES = 8  # frames of a video
STEPS = 64  # time steps of a spectrogram
SAMPLES = 8_000  # samples of a sound
MOST_PATCHES = 32  # patches along a side
GRID = 4  # patches along each side, where the model takes patches
FIRST_LAYERS = 3  # layers, one of which may read the input
SIZE = "image_size", "img_size", "input_size", "crop_size"
MOST_TRIES = 100
MOST_VALUES = 2**24  # of one tensor in a try: features of a sound grow with the square of its samples
MOST_TOKENS = 1300  # attention over all pairs of more tokens would fill the memory in a replay
BESIDE = ("mask", "len", "sizes", "grid")  # parts of names of optional arguments that go with an input

Inputs = dict[str, Tensor]

_NAMED: dict[tuple[str, ...], Modality] = {
    ("text",): "text",
    ("vision",): "vision",
    ("audio",): "audio",
    ("text", "vision"): "vision-language",
    ("audio", "text"): "audio-language",
    ("audio", "vision"): "several",
    ("audio", "text", "vision"): "several",
}


def modality_of(cls: type[Any]) -> Modality:
    """The modality of a class. Tokens of a decoder's own do not count: a speech recogniser reads sound."""
    taken = inspect.signature(cls.forward).parameters
    found = set()
    for name in taken:
        if name == "input_ids":
            found.add("text")
        elif "pixel" in name or "patches" in name or "grid_thw" in name:
            found.add("vision")
        elif name.startswith(("input_features", "input_values", "audio")):
            found.add("audio")
    return _NAMED.get(tuple(sorted(found)), "other")


def modality_of_type(model_type: str) -> Modality:
    """The modality of a type's base model; 'other' where it has none."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        found = auto_models("BASE").get(config_class, None) or class_of_config(config_class)
        return modality_of(found[0] if isinstance(found, tuple) else found)
    except Exception:  # a class whose own libraries are not installed
        return "other"


def made_inputs(model: PreTrainedModel, stack: Any, name: str) -> Inputs:
    """Noise under `name` that `stack`, the part of the model that is run, accepts, with the other arguments that it
    needs; TinyError where no shape fits."""
    config, fault = getattr(stack, "config", model.config), None
    for inputs in itertools.islice(_candidates(name, config, stack), MOST_TRIES):
        try:
            with torch.no_grad(), SmallTensors(MOST_VALUES):
                output = _first(stack(**inputs))
        except Exception as error:
            fault = fault or one_line(error)
            continue
        if output is None or not bool(torch.isfinite(output).all()):
            continue
        if output.ndim != 3 or output.shape[1] <= MOST_TOKENS:
            return inputs
        fault = f"it makes {output.shape[1]} tokens of it, more than {MOST_TOKENS}"
    raise TinyError(f"no made-up `{name}` suits it: {fault or 'its output is not finite'}")


def _first(output: Any) -> Tensor | None:
    """The first tensor in a model's output."""
    if isinstance(output, Tensor):
        return output
    several = output.values() if hasattr(output, "values") else output
    return next((one for one in several if isinstance(one, Tensor)), None)


def _candidates(name: str, config: Any, stack: Any) -> Iterator[Inputs]:
    """Inputs with the required other arguments, then with optional ones."""
    taken = inspect.signature(stack.forward).parameters
    named = [p for p in taken.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in named if p.default is p.empty]
    optional = [p.name for p in named if any(part in p.name for part in BESIDE) and not p.name.startswith("output")]
    generator = torch.Generator().manual_seed(0)
    for more in (required, list(dict.fromkeys([*required, *optional]))):
        noise = ((torch.randn(s, generator=generator), given) for s, given in _shapes(name, config, set(taken)))
        for main, given in itertools.chain(noise, ((one, {}) for one in _by_first_layers(stack, generator))):
            rest = [one for one in more if one != name and one not in given]
            for values in itertools.product(*(list(_beside(one, main, config)) for one in rest)):
                yield {name: main, **given, **dict(zip(rest, values, strict=True))}
        if set(optional) <= set(required):
            return


def _shapes(name: str, config: Any, taken: set[str]) -> Iterator[tuple[tuple[int, ...], Inputs]]:
    """Shapes of the input, each with arguments that go with it."""
    channels = _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    patch = _number(config, "patch_size", otherwise=4)
    if "spatial_shapes" in taken:
        mask = torch.ones(1, GRID * GRID, dtype=torch.long)
        named = next((n for n in ("pixel_attention_mask", "attention_mask") if n in taken), "attention_mask")
        yield (1, GRID * GRID, channels * patch**2), {named: mask, "spatial_shapes": torch.tensor([[GRID, GRID]])}
    grid = next((n for n in ("grid_thw", "image_grid_thw") if n in taken), None)
    if grid is not None:
        depth = _number(config, "temporal_patch_size", otherwise=1)
        one: Inputs = {grid: torch.tensor([[1, GRID, GRID]])}
        yield (GRID * GRID, channels * depth * patch**2), one
        yield (GRID * GRID, channels, patch, patch), one
        yield (1, GRID * GRID, channels, patch, patch), one
        return
    if "pixel" in name or "patches" in name or "image" in name:
        yield from ((shape, {}) for shape in _pictures(config, channels, patch))
        return
    bands = _number(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", otherwise=16)
    positions = _number(config, "max_source_positions", otherwise=STEPS // 2)
    yield (1, bands, 2 * positions), {}
    yield (1, STEPS, bands), {}
    yield (1, _number(config, "max_length", "context_length", otherwise=STEPS), bands), {}
    yield (1, SAMPLES), {}
    yield (1, 1, SAMPLES), {}
    yield (1, bands, 200), {}
    yield (bands, 200), {}
    yield (1, GRID * GRID, _number(config, "hidden_size", "d_model", otherwise=32)), {}


def _pictures(config: Any, channels: int, patch: int) -> Iterator[tuple[int, ...]]:
    side = _number(config, *SIZE, otherwise=SIDES[0])
    if side > patch * MOST_PATCHES:  # attention over all its patches would fill the memory
        side = GRID * patch
    whole = next((v for n in SIZE if isinstance(v := getattr(config, n, None), list | tuple) and len(v) == 2), None)
    if whole is not None:
        yield 1, channels, *whole
    frames = _number(config, "num_frames", "frames_per_clip", otherwise=FRAMES)
    for across in dict.fromkeys((side, *SIDES)):
        square = across, across
        yield 1, channels, *square
        yield 1, frames, channels, *square
        yield 1, channels, frames, *square
        yield 1, 1, channels, *square
        yield 1, 2, channels, *square
        yield 1, 1, 1, channels, *square
        yield 1, 1, 4, channels, *square
    yield 1, GRID * GRID, channels * patch**2
    yield GRID * GRID, channels, patch, patch


def _by_first_layers(stack: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
    """Inputs that fit the first layers of the stack, one of which is likely to read the input."""
    layers = [m for m in stack.modules() if isinstance(m, nn.Linear | nn.Embedding) or is_convolution(m)]
    for layer in layers[:FIRST_LAYERS]:
        if isinstance(layer, nn.Embedding):
            yield torch.randint(0, layer.num_embeddings, (1, GRID * GRID), generator=generator)
            continue
        shapes: list[tuple[int, ...]]
        if isinstance(layer, nn.Linear):
            width = layer.in_features
            shapes = [(1, GRID * GRID, width), (GRID * GRID, width), (1, STEPS, width)]
        else:
            channels, axes = int(layer.in_channels), layer.weight.ndim - 2  # type: ignore[arg-type, operator]
            shapes = [(1, channels, *[side] * axes) for side in SIDES[:2]]
        yield from (torch.randn(shape, generator=generator) for shape in shapes)


def _beside(name: str, main: Tensor, config: Any) -> Iterator[Tensor]:
    """Values that another argument of this name may have."""
    width = _number(config, "hidden_size", "d_model", otherwise=32)
    steps = [main.shape[-1]] if main.ndim < 4 else []
    steps = list(dict.fromkeys([*main.shape[1:2], *steps]))
    if "grid" in name:
        yield torch.tensor([[1, GRID, GRID]])
    elif "mask" in name:
        yield from (torch.ones(1, count, dtype=torch.bool) for count in steps)
        patch = _number(config, "patch_size", otherwise=4)
        yield torch.ones(1, *(max(1, side // patch) for side in main.shape[-2:]), dtype=torch.bool)
        yield torch.ones_like(main)
        yield torch.ones(main.shape[:-3], dtype=torch.long)
    elif "len" in name:
        yield from (torch.tensor([count]) for count in steps)
        yield from (torch.tensor([count // 2]) for count in steps)
    elif "sizes" in name:
        yield from (torch.tensor([[GRID, GRID]]), torch.tensor([1]))
    elif "ids" in name or "idx" in name:
        count = main.shape[1]
        yield torch.arange(count)[None]
        across = torch.arange(count)
        yield torch.stack([across % GRID, across // GRID], dim=-1)[None]
        yield torch.ones(1, 1, dtype=torch.long)
    else:
        yield torch.ones(1, 1, dtype=torch.long)
        yield torch.ones_like(main)
        yield torch.ones(1, GRID * GRID, width)
        yield torch.ones(1, width)


def _number(config: Any, *names: str, otherwise: int) -> int:
    """The first of these fields that is a number, or holds one in front; in the config, else in one inside it."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    found = (_number(value, *names, otherwise=0) for value in inner)
    return next((number for number in found if number), otherwise)
