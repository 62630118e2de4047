"""The meaning of the keys of an adapter's tensors: the base module that each belongs to, and its role there.

Keys come in dialects. PEFT writes `base_model.model.<module>.lora_A.weight`; older files keep the adapter's name
(`.lora_A.default.weight`), and some tools omit the prefix. A tensor that is no tuner's own is a value that replaces the
base's: `modules_to_save`, biases, and copies of the embedding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.folder import AdapterFiles
from duat_cli.loading.checkpoint.files import fail
from duat_cli.text import shown

PREFIX = "base_model.model."
_PARTS = (
    "lora_A", "lora_B", "lora_E", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "ia3_l",
    "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2",
    "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "trainable_tokens_delta",
)  # fmt: skip
_PART = re.compile(rf"^(?P<module>.*?)\.(?P<part>{'|'.join(sorted(_PARTS, key=len, reverse=True))})(?P<rest>\..*)?$")
_INFIXES = re.compile(r"\.(base_layer|token_adapter|modules_to_save(\.default)?)(?=\.|$)")


@dataclass(frozen=True)
class Target:
    """One module that a tuner wraps, and the tensors it has there."""

    module: str
    """Its name in the base model, without PEFT's prefix and infixes."""
    depth: int
    """Number of wrappers around this one; nested wrappers change several parameters of one module."""
    parts: dict[str, str] = field(default_factory=dict)
    """'lora_A' -> key of the tensor; 'lora_B.bias' for the bias of a part."""


@dataclass(frozen=True)
class Keys:
    """All tensors of an adapter, by their meaning."""

    targets: list[Target]
    saved: dict[str, str]
    """Base parameter -> key of the tensor that replaces it."""
    dialects: tuple[str, ...]
    """Ways in which the keys differ from PEFT's, in words."""


def read_keys(adapter: AdapterFiles) -> Keys:
    """Sorts the keys; CheckpointError for two keys that mean the same tensor and hold different values."""
    targets: dict[tuple[str, int], Target] = {}
    saved: dict[str, str] = {}
    dialects: dict[str, None] = {}
    for key in adapter.tensors:
        if ".original_module." in key:  # a copy of the base beside a saved module
            continue
        once = key.removeprefix(PREFIX)
        name = once.removeprefix(PREFIX)
        if once == key or once != name:
            dialects[f"keys {'without the prefix' if once == key else 'with twice the prefix'} '{PREFIX}'"] = None
        found = _PART.match(name)
        if found is None:
            _put(adapter, saved, _INFIXES.sub("", name), key)
            continue
        module, part, rest = found["module"], found["part"], (found["rest"] or "").lstrip(".")
        words = [word for word in rest.split(".") if word not in ("", "weight")]
        if words and words[-1] == "bias":
            part, words = f"{part}.bias", words[:-1]
        if words:
            dialects["keys with the adapter's name"] = None
        depth = len(re.findall(r"\.base_layer(?=\.|$)", module))
        place = (_INFIXES.sub("", module), depth)
        target = targets.setdefault(place, Target(*place))
        _put(adapter, target.parts, part, key)
    if not targets and not saved:
        fail(adapter.where, "holds no tensors: an empty adapter")
    return Keys(list(targets.values()), saved, tuple(dialects))


def _put(adapter: AdapterFiles, into: dict[str, str], name: str, key: str) -> None:
    if name not in into:
        into[name] = key
    elif not _equal(adapter, key, into[name]):
        raise CheckpointError(f"{adapter.where}: {shown(key)} and {shown(into[name])} mean the same tensor")


def _equal(adapter: AdapterFiles, one: str, other: str) -> bool:
    """Whether two tensors of the adapter hold the same values: PEFT writes modules to save twice once they are
    resized."""
    first, second = adapter.tensors[one], adapter.tensors[other]
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    import torch  # imported here, because keys are read before torch is loaded

    from duat_cli.loading.checkpoint.reader import Reader

    reader = Reader(adapter.weights)
    return torch.equal(reader.tensor(one), reader.tensor(other))


def matching(patterns: list[str], name: str) -> str | None:
    """The first pattern for which `(.*\\.)?(key)$` matches the name: PEFT's rule for rank_pattern and alpha_pattern."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return pattern
        except re.error as error:
            raise CheckpointError(f"pattern {shown(pattern)} is no regular expression: {error}") from error
    return None
