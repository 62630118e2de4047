"""The base model's tensors by parameter name, one at a time, straight from the safetensors files.

A tensor's name in a file is not always its parameter's name: a file may lack the head's prefix, and transformers
renames and fuses some tensors at load (experts). A parameter that no file name fits is looked up in the loaded model,
which is then loaded once, in the stored dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from duat_cli.compat.transformers import experts_hold_inputs_first, is_conv1d
from duat_cli.errors import DuatError
from duat_cli.grouping import by_key
from duat_cli.loading.checkpoint.dtypes import most_bytes_in
from duat_cli.loading.checkpoint.orientation import inputs_first, stack_of
from duat_cli.loading.checkpoint.preflight import CheckpointFiles, config_fields
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.source import Source

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared")
HEADS = ("lm_head", "embed_out", "output_projection")
VOCABULARY = (*EMBEDDINGS, *HEADS)
TABLES = (*EMBEDDINGS, "wpe", "relative_attention_bias")


@dataclass(frozen=True)
class Place:
    """The place of one base parameter."""

    parameter: str
    """Its name in the base model, as far as the files and the adapter show it."""
    tensor: str
    """Its name in the files, or in the loaded model."""
    shape: tuple[int, ...]
    loaded: bool
    """Whether it is read from the loaded model."""


class BaseWeights:
    """Looks parameters up and reads them; use it inside `with`."""

    def __init__(self, source: Source, files: CheckpointFiles) -> None:
        self.source, self.files = source, files
        self._reader = Reader(files)  # without threads, because processes may be forked meanwhile
        self._state: dict[str, Tensor] | None = None
        self._tails = by_key((name.partition(".")[2], name) for name in files.tensors)

    def __enter__(self) -> BaseWeights:
        return self

    def __exit__(self, *exit_: object) -> None:
        self._state = None

    def find(self, parameter: str, *, load: bool = True) -> Place | None:
        """The place of a parameter; None where the base has none of that name.

        load: whether to build the model where the file names alone do not answer.
        """
        tensor = self._in_files(parameter)
        if tensor is not None:
            entry = self.files.tensors[tensor]
            longer = tensor if tensor.endswith("." + parameter) else parameter
            return Place(longer, tensor, entry.shape, False)
        if not load:
            return None
        shapes = self._shapes
        name = next((n for n in (parameter, *_tail(parameter)) if n in shapes), None)
        if name is None:
            return None
        return Place(parameter, name, shapes[name], True)

    def read(self, place: Place) -> Tensor:
        """The tensor as it is stored, in memory of its own or of the loaded model: do not write to it. A quantised
        weight comes in float32, because its computed values are not rounded to a stored dtype."""
        if place.loaded:
            return self._loaded()[place.tensor]
        entry = self.files.tensors[place.tensor]
        tensor = self._reader.tensor(place.tensor)
        return tensor.float() if entry.made else tensor

    def rows(self, tensor: str, count: int) -> Tensor:
        """The first rows of one of the files' tensors, by its name there."""
        return self._reader.rows(tensor, range(min(count, self.files.tensors[tensor].shape[0])))

    def _in_files(self, parameter: str) -> str | None:
        held = self.files.tensors
        if parameter in held:
            return parameter
        longer = self._tails.get(parameter, [])
        if len(longer) == 1:  # the adapter's keys lack a prefix
            return longer[0]
        return next((n for n in _tail(parameter) if n in held), None)  # the file's lack it

    def _loaded(self) -> dict[str, Tensor]:
        """Every parameter of the model by its module's name, tied ones under each of their names."""
        if self._state is None:
            from duat_cli.loading.model.load import load_files  # imports transformers, so only on demand

            model = load_files(self.source, self.files, dtype=self.dtype()).model
            self._state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return self._state

    @functools.cached_property
    def _model(self) -> Any:
        """The model without memory, which suffices for its names, shapes and classes."""
        from duat_cli.loading.model.load import skeleton

        return skeleton(self.files)

    @functools.cached_property
    def _state_names(self) -> dict[str, Tensor]:
        """Every parameter of the model without memory by its name; a tied one is one object under several names."""
        return dict(self._model.state_dict(keep_vars=True))

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._state_names.items()}

    def first_name(self, parameter: str) -> str:
        """The first of the names that the model has for a parameter, several where it is tied; the name itself where
        the model has none such."""
        held = self._state_names
        own = next((held[n] for n in (parameter, *_tail(parameter)) if n in held), None)
        return next((name for name, tensor in held.items() if tensor is own), parameter)

    def dtype(self) -> str:
        """The dtype of most stored bytes; quantised weights count with the dtype of their values."""
        return most_bytes_in(self.files) or "float32"

    def is_vocabulary(self, place: Place) -> bool:
        """Whether a parameter has one row per token, so that a resized vocabulary changes their number."""
        sizes = {v for k, v in config_fields(self.files.config) if k.rpartition(".")[2] == "vocab_size"}
        return bool(place.shape) and (place.shape[0] in sizes or _module_of(place.parameter) in VOCABULARY)

    def has_row_a_class(self, place: Place) -> bool:
        """Whether a parameter may belong to a head with a score for every label; transformers has 2 labels where
        config.json states none."""
        labels = self.files.config.get("id2label")
        return place.shape[:1] == (len(labels) if isinstance(labels, dict) else 2,)

    @property
    def ties_head(self) -> bool:
        """Whether the head is the embedding, as config.json says; if it says nothing, whether the files have no
        head."""
        stated = self.files.config.get("tie_word_embeddings")
        return stated if isinstance(stated, bool) else not any(_module_of(name) in HEADS for name in self.files.tensors)

    def weights_of(self, modules: Sequence[str]) -> list[str]:
        """The files' tensors that are the weights of layers of these names, such as EMBEDDINGS."""
        return [n for n in self.files.tensors if n.endswith(".weight") and _module_of(n) in modules]

    def holds_inputs_first(self, module: str) -> bool:
        """Whether a module of experts declares that it stores (experts, in, out)."""
        return experts_hold_inputs_first(self._module(module))

    def inputs_first(self, parameter: str) -> bool:
        """Whether a matrix is stored as (in, out): an embedding's table, or a weight whose neighbours are."""
        return self._is_table(parameter) or bool(self.is_transposed(parameter))

    def layer_is_transposed(self, module: str) -> bool | None:
        """Whether the class of a linear layer stores its weight as (in, out). None where no class is known."""
        layer = self._known_module(module)
        return is_conv1d(layer) if isinstance(layer, nn.Linear) or is_conv1d(layer) else None

    def _is_table(self, parameter: str) -> bool:
        """Whether a matrix is an embedding's table, with a row for every token, position or bucket. Where its name does
        not tell, the class of its layer does."""
        module = parameter.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if last in TABLES or last in HEADS or "emb" not in last:
            return last in TABLES
        layer = self._known_module(module)
        return "embed" in last if layer is None else isinstance(layer, nn.Embedding)

    def _known_module(self, module: str) -> nn.Module | None:
        """The model's module of that name; None where the model has none, or its classes are not known."""
        try:
            return self._module(module)
        except DuatError:
            return None

    def _module(self, module: str) -> nn.Module | None:
        modules = self._modules
        return next((modules[n] for n in (module, *_tail(module)) if n in modules), None)

    @functools.cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self._model.named_modules())

    def parameters(self) -> list[str]:
        """Names of all parameters, in the order in which the model's classes declare them."""
        return list(self._shapes)

    def is_transposed(self, parameter: str) -> bool | None:
        """Whether a square weight is stored as (in, out), as its neighbours are: layers whose bias shows which side is
        out. None where no neighbour shows it, or they disagree."""
        found = self._inputs_first.get(stack_of(parameter), set())
        return next(iter(found)) if len(found) == 1 else None

    @functools.cached_property
    def _inputs_first(self) -> dict[str | None, set[bool]]:
        return inputs_first(self.files.tensors)


def _module_of(parameter: str) -> str:
    """The last part of the name of the parameter's module."""
    return parameter.rpartition(".")[0].rpartition(".")[2]


def _tail(parameter: str) -> Iterator[str]:
    """The name without its first component, which is the base model's prefix in a model with a head."""
    rest = parameter.partition(".")[2]
    if "." in rest:
        yield rest
