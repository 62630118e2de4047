"""The inputs of a model: token ids, or prepared images and sound; and those that it is probed with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from duat_cli.compat.transformers import stated
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.instrument.calls import taken_by

Given = Tensor | Mapping[str, Tensor]
"""The input of a stack: token ids (1, N), or prepared inputs by the names of its forward pass."""

_LIBRARIES = {"torch", "transformers", "peft"}
STATES = "encoder_hidden_states"
"""The argument name of the encoder's states in every decoder."""

GRID = "grid_thw"
"""The argument name of the number of frames, rows and columns of each picture, in a part that reads the patches of
pictures, (N, width), without a batch."""

DECODER = ", and duat attribute the decoder: --stack decoder"

DISCOVERY_TOKENS = 11  # short, odd, and unlike a count of heads or experts
SEED = 20240511
UNSTATED_VOCABULARY = 128  # token ids tried where a config states no vocabulary (characters that are hashed)

KINDS = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}


def of_libraries(module: nn.Module) -> bool:
    """Whether a module's class comes from a known library, and not from a checkpoint or a caller."""
    return type(module).__module__.partition(".")[0] in _LIBRARIES


def stack_of(model: Any) -> Any:
    """The part that is run: the encoder of an encoder-decoder, else the model without its head. An encoder behind a
    network that reads the picture is run within the model."""
    base, name = model.base_model, str(getattr(model, "main_input_name", "input_ids"))
    if base is model or isinstance(base, nn.ModuleDict | nn.ModuleList):  # `base_model_prefix` names no callable part
        base = _beside_head(model)
    if is_pair(model):
        encoder = model.get_encoder()
        fed = name in KINDS and name in taken_by(base.forward) and name not in taken_by(encoder.forward)
        return base if fed else encoder
    taken = taken_by(base.forward)
    # `base_model` of some image models is an inner encoder, which takes embedded patches (dinov3_vit)
    inner = name != "input_ids" and name not in taken and name in taken_by(model.forward)
    return model if inner else base


def _beside_head(model: Any) -> Any:
    """The inner model that holds all weights except those of the head. The model itself where there is none, and where
    it is custom code, which may do more than run the inner model."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None and of_libraries(model):
        others = set(model.parameters()) - set(head.parameters())
        for inner in model.children():
            if hasattr(inner, "config") and head not in set(inner.modules()) and others <= set(inner.parameters()):
                return inner
    return model


def cache_off(stack: Any) -> dict[str, Any]:
    """The argument that turns the cache off, where the forward pass takes it: a cache would grow with every replay, and
    mixers run other code with one. A model with a head may pass the argument on to the stack inside it."""
    taken, inner = taken_by(stack.forward), getattr(stack, "base_model", stack)
    known = "use_cache" in taken or ("kwargs" in taken and "use_cache" in taken_by(inner.forward))
    return {"use_cache": False} if known else {}


def is_pair(model: Any) -> bool:
    """Whether a model is an encoder with a decoder. Either of them alone is not, whatever its config says."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and model.get_encoder() is not model


def without_decoder(model: Any) -> Any:
    """The encoder of an encoder-decoder, else the model with its head."""
    return model.get_encoder() if is_pair(model) else model


def for_decoder(given: Given | None) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether an input is a decoder's: token ids with the states of an encoder."""
    return isinstance(given, Mapping) and STATES in given


def part_reading(model: Any, given: Given | None) -> Any:
    """The part of a model that an input is for: of an encoder-decoder, the decoder for states of the encoder, and the
    encoder for any other input; else the model with its head."""
    return decoder_of(model) if for_decoder(given) else without_decoder(model)


def decoder_of(model: Any) -> Any:
    """The decoder of an encoder-decoder, as a model by itself. Raises UnsupportedModelError where there is none."""
    name = type(model).__name__
    if not is_pair(model):
        raise UnsupportedModelError(f"{name} has no encoder beside a decoder")
    decoder = model.get_decoder()
    # asked of its own forward pass: the part of it that is run may hide its arguments behind *args (TrOCR's does)
    takes = hasattr(decoder, "config") and {ids_name(decoder), STATES} <= taken_by(decoder.forward)
    if decoder is model or decoder is model.get_encoder() or not takes:
        raise UnsupportedModelError(f"{name}: its decoder is no model that takes token ids and `{STATES}`")
    if getattr(model, "enc_to_dec_proj", None) is not None:
        raise UnsupportedModelError(
            f"{name}: a layer between its encoder and its decoder (enc_to_dec_proj) is not read"
        )
    return decoder


def writes(model: Any) -> bool:
    """Whether the model has a decoder that `decoder_of` returns."""
    try:
        return decoder_of(model) is not None
    except UnsupportedModelError:
        return False


def ids_name(stack: Any) -> str:
    """The argument name of token ids in a forward pass. Where it takes no `input_ids`, but the model has a table of
    tokens, the ids go by the name of another input (SpeechT5's text encoder uses the one of sound)."""
    taken = taken_by(stack.forward)
    if "input_ids" not in taken and hasattr(stack, "config"):
        with contextlib.suppress(AttributeError, NotImplementedError):  # as transformers says that there are none
            if isinstance(without_decoder(stack).get_input_embeddings(), nn.Embedding):
                return next((name for name in KINDS if name in taken), "input_ids")
    return "input_ids"


def input_name(model: Any) -> str:
    """The name of the input that a forward pass reads: `input_ids` for token ids, whatever the pass calls them; else
    the one that its class states, else one with a known name, else its first argument."""
    stack = stack_of(model)
    name = str(getattr(stack, "main_input_name", "input_ids"))
    taken = taken_by(stack.forward)
    if ids_name(stack) in taken:
        return "input_ids"
    known = [one for one in (name, *KINDS) if one in taken]
    if known:
        return known[0]
    first = next(iter(inspect.signature(stack.forward).parameters.values()), None)
    # a forward pass of *args hides its arguments; running it will tell
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else "input_ids"


def kind_read(model: Any) -> str | None:
    """The kind of input, images or sound, where the forward pass reads one of them; None for any other input."""
    named = KINDS.get(input_name(model))
    return KINDS["pixel_values"] if named is None and GRID in taken_by(stack_of(model).forward) else named


def needs_more(model: Any, name: str) -> bool:
    """Whether a forward pass that reads a picture requires more inputs: sizes and masks of its patches (SigLIP 2)."""
    parameters = inspect.signature(stack_of(model).forward).parameters.values()
    demanded = {one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD}
    return bool(demanded - {name}) and KINDS.get(name) == KINDS["pixel_values"]


def part_within(stack: Any, given: Given | None) -> Any:
    """The part of a model that holds the blocks, where that is not all of it. For pictures or sound within a text it is
    the outermost inner model that takes token ids and neither of these; for an encoder-decoder, the encoder. None for
    one kind of input alone, and where there is no such part."""
    if is_pair(stack):
        return stack.get_encoder()
    if given is None or isinstance(given, Tensor) or "input_ids" not in given:
        return None
    if not any(name.startswith(tuple(KINDS)) for name in given):  # `pixel_values_videos` too
        return None
    for inner in stack.modules():
        taken = taken_by(inner.forward) if hasattr(inner, "config") else frozenset()
        if "input_ids" in taken and not KINDS.keys() & taken:
            return inner
    return None


def class_reads_ids(cls: type[Any]) -> bool:
    """Whether models of a class read token ids: the input that the class states is none of pictures or sound, and its
    forward pass takes `input_ids` or no input of pictures or sound."""
    names, taken = getattr(cls, "main_input_name", "input_ids"), taken_by(cls.forward)
    read = KINDS.keys().isdisjoint([names] if isinstance(names, str) else names)
    return read and ("input_ids" in taken or KINDS.keys().isdisjoint(taken))


def require_token_ids(model: Any) -> None:
    """Refuses a model whose forward pass takes no `input_ids`, naming what it takes instead."""
    name = input_name(model)
    if name != "input_ids":
        read = kind_read(model)
        if read is None and not of_libraries(model):
            raise UnsupportedModelError(
                f"{type(model).__name__}: its forward pass takes `{name}`; name the argument for token ids input_ids, "
                "as transformers' models do"
            )
        kind, decoder = "" if read is None else f" ({read})", DECODER if writes(model) else ""
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) takes `{name}`{kind}, no token ids; duat inspect, "
            "verify, matrix, compare, check, prune-bound and lora-diff (without --out) read such models" + decoder
        )


def placed(given: Given, device: Any, dtype: torch.dtype) -> Given:
    """The input on a device, floating-point tensors (of prepared inputs) in the model's dtype."""
    return given.to(device) if isinstance(given, Tensor) else placed_tensors(given, device, dtype)


def placed_tensors(given: Mapping[str, Tensor], device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Prepared inputs on a device, floating-point tensors in the model's dtype."""
    return {n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in given.items()}


def in_rows(given: Given, rows: int) -> Given:
    """The input repeated as `rows` rows of a batch; for more than one row, every tensor must have 1 in front."""
    if isinstance(given, Tensor):
        return given.expand(rows, *given.shape[1:]).contiguous()
    return given if rows == 1 else {n: t.expand(rows, *t.shape[1:]).contiguous() for n, t in given.items()}


def noise_like(given: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The prepared inputs with floating-point tensors replaced by random ones of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in given.items()
    }


def probe_ids(stack: Any, tokens: int, device: str | None = None) -> Tensor:
    """Random token ids, none of them special, (1, tokens). device: None for that of the weights."""
    table = getattr(stack, "embed_tokens", None)  # FSMT's encoder has no config
    rows = stated(getattr(stack, "config", None), "vocab_size") or getattr(table, "num_embeddings", UNSTATED_VOCABULARY)
    generator = torch.Generator().manual_seed(SEED)
    low = min(10, rows - 1)
    ids = torch.randint(low, rows, (1, tokens), generator=generator)
    return ids.to(stack.device if device is None else device)


def probe_inputs(
    stack: Any, like: Mapping[str, Tensor] | None, tokens: int, device: str | None = None, seed: int = SEED
) -> Given:
    """The input that a model is probed with: ids as `probe_ids` makes them, or noise shaped as the prepared inputs."""
    if like is None:
        return probe_ids(stack, tokens, device)
    made = noise_like(like, seed)
    if STATES in made:  # a decoder is given ids of its own, and states of no particular encoder
        shape = 1, tokens + 2, made[STATES].shape[-1]
        made = noise_like({STATES: made[STATES].new_zeros(()).expand(shape)}, seed)
        made["input_ids"] = probe_ids(stack, tokens, device)
    return placed(made, stack.device if device is None else device, stack.dtype)


def by_place(states: Tensor, stack: Any) -> Tensor:
    """Hidden states that are a map, as (1, N, channels): its channels stand behind where the last axis, and not the
    second, is as wide as the config says of hidden states; else in front, as convolutions have them."""
    width = stated(getattr(stack, "config", None), "hidden_size")
    behind = states.shape[-1] == width != states.shape[1]
    return states.flatten(1, 2) if behind else states.flatten(2).mT
