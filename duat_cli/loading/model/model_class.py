"""The class that a checkpoint is loaded as, and a rehearsal of the load without memory: does every tensor have its
place?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from duat_cli.compat.transformers import (
    as_weights_are,
    auto_class_names,
    auto_models,
    class_of_checkpoint,
    modeling_file,
)
from duat_cli.errors import CheckpointError
from duat_cli.loading.checkpoint.files import fail
from duat_cli.loading.checkpoint.preflight import CONFIG, CheckpointFiles
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.loading.model.blame import blamed, fitting_fields
from duat_cli.loading.model.weights_check import refuse_turned
from duat_cli.loading.quiet import foreign_errors
from duat_cli.text import clean, listed, plural, shown


def check_model_type(files: CheckpointFiles, trust_remote_code: bool) -> None:
    """Refuses a type that this transformers does not know, unless trusted code comes with the checkpoint."""
    where, auto_map = files.path / CONFIG, files.config.get("auto_map")
    model_type = files.config.get("model_type")
    is_known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if (trust_remote_code and auto_map) or is_known:
        return
    if auto_map:
        fail(where, f"auto_map: model_type {shown(model_type)} needs custom code that comes with the "
                    "checkpoint; it was not run. Read it, then use --trust-remote-code")  # fmt: skip
    fail(where, f"model_type: {shown(model_type)} is unknown to transformers {transformers.__version__}; "
                "a newer transformers may know it")  # fmt: skip


def _not_run(cls: type[PreTrainedModel], files: CheckpointFiles) -> list[str]:
    """A note where the checkpoint has code of its own for a type that transformers also knows."""
    if not files.config.get("auto_map"):
        return []
    return [
        f"{CONFIG} names code of its own (auto_map), which was not run: read as transformers' {cls.__name__}; with "
        "--trust-remote-code it is run instead"
    ]


def model_class(
    config: PreTrainedConfig, files: CheckpointFiles, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], list[str]]:
    """The class that config.json names, and notes.

    If it names no known class, there is a note, and the class is the one for next tokens, or else for classes of
    pictures, if the files hold all of its tensors and no others, as `AutoModelForCausalLM` would choose; else the base
    model.
    """
    names: list[str] = files.config.get("architectures") or []
    if trust_remote_code and files.config.get("auto_map"):
        remote = _remote_class(files, names)
        if remote is not None:
            return remote, []
    for name in names:
        cls = _named_class(name, config)
        if cls is not None:
            return cls, _not_run(cls, files)
    got = f"{listed(names)} is no {config.model_type} class of transformers" if names else "it names none"
    note = f"config.json: architectures: {got}; loaded as "
    heads = _class_for_next_tokens(config, files), _class_for("IMAGE_CLASSIFICATION", config)
    for with_head in filter(None, heads):
        if _fills(with_head, config, files):
            return with_head, [f"{note}{with_head.__name__}, which the files fill"]
    base = _base_class(config, files)
    return base, [f"{note}{base.__name__}, without a head"]


def _named_class(name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' class of this name, if it is one for this config. Text parts of larger models are found in their
    modeling file only."""
    found: Any = getattr(transformers, name, None) or getattr(modeling_file(config), name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        return None
    cls: Any = found
    made_for = cls.config_class is not None and isinstance(config, cls.config_class)
    return cls if made_for or name in auto_class_names(config.model_type) else None


def _class_for_next_tokens(config: PreTrainedConfig, files: CheckpointFiles) -> type[PreTrainedModel] | None:
    cls = _class_for("CAUSAL_LM", config)
    if cls is None or not any(name.startswith(f"{cls.base_model_prefix}.") for name in files.tensors):
        return None  # a base model's own tensors have no prefix, and with a tied head they would be all of this class's
    return cls


def _class_for(task: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that transformers has for this config and this task, the first of several; None where it has none."""
    models = auto_models(task)
    if type(config) not in models:
        return None
    found = models[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _fills(cls: type[PreTrainedModel], config: PreTrainedConfig, files: CheckpointFiles) -> bool:
    """Whether the files hold all tensors of a class and no others."""
    try:
        _, info = _rehearsed(cls, config, files, torch.float32)
    except Exception:  # the base model's error says what is wrong with the files
        return False
    return not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def _base_class(config: PreTrainedConfig, files: CheckpointFiles) -> type[PreTrainedModel]:
    found = _class_for("BASE", config)
    if found is None:
        where = clean(str(files.path / "config.json"))
        raise CheckpointError(
            f"{where}: architectures: no class for model_type {shown(config.model_type)} is named, and "
            f"transformers {transformers.__version__} has no base model for it"
        )
    return found


def _remote_class(files: CheckpointFiles, names: list[str]) -> type[PreTrainedModel] | None:
    """The class of the checkpoint's own code; only with --trust-remote-code."""
    auto_map = files.config["auto_map"]
    references = [v for k, v in auto_map.items() if k.startswith("AutoModel") and isinstance(v, str)]
    references.sort(key=lambda reference: reference.rpartition(".")[2] not in names)
    if not references:
        return None
    with foreign_errors(f"{clean(str(files.path))}: auto_map {shown(references[0])}"):
        return class_of_checkpoint(references[0], str(files.path))


@dataclass(frozen=True)
class Fit:
    """The fit of a checkpoint's tensors to a class, where they go together."""

    unexpected: tuple[str, ...]
    """Tensors of the files that the class does not use."""
    spare: tuple[str, ...]
    """Missing tensors that do not matter."""
    model: PreTrainedModel
    """The modules without weights, on `meta`."""

    def notes(self, cls: type[PreTrainedModel], files: CheckpointFiles) -> list[str]:
        notes = [f"the file has no pooler, taken as zero: {listed(list(self.spare))}"] if self.spare else []
        if self.unexpected:
            many = plural(len(self.unexpected), "unexpected tensor")
            notes.append(f"{many}, unused by {cls.__name__}: {listed(list(self.unexpected))}")
        if lost := self._lost_biases(files):
            notes.append(f"{listed(lost)}: not zero, but {cls.__name__} adds no bias there: with it the model is "
                         "another than the one that is read")  # fmt: skip
        return notes

    def _lost_biases(self, files: CheckpointFiles) -> list[str]:
        """Biases in the files, not zero, of layers to which the class gives no bias; some formats store zeros there."""
        used = files.tensors.keys() - set(self.unexpected)
        lost = [name for name in self.unexpected if name.endswith(".bias") and name in files.tensors]
        lost = [name for name in lost if f"{name.removesuffix('bias')}weight" in used]
        reader = Reader(files)
        return [name for name in lost if bool(reader.tensor(name).any())]


def check_fit(cls: type[PreTrainedModel], config: PreTrainedConfig, files: CheckpointFiles, dtype: torch.dtype) -> Fit:
    """Rehearses the load without memory.

    Only transformers can tell what fits, because it renames and fuses tensors between file and modules. Tied weights
    and buffers that are computed are not among the tensors it calls missing. A missing tensor is an error, except the
    pooler, which encoders are often saved without and which stands behind the last block.
    """

    def told(content: dict[str, Any]) -> Any:
        """The report of transformers on the tensors under another config; None where it refuses the config, with
        whatever error."""
        try:
            return _rehearsed(cls, as_weights_are(type(config).from_dict(content)), files, dtype)[1]
        except Exception:
            return None

    def fits(content: dict[str, Any], absent: set[str]) -> bool:
        found = told(content)
        return found is not None and not found["mismatched_keys"] and not set(found["missing_keys"]) - absent

    try:
        with foreign_errors(cannot(cls, files, CONFIG)):  # there are no values yet
            model, info = _rehearsed(cls, config, files, dtype)
    except CheckpointError as fault:
        why = blamed(files.config, str(fault.__cause__), lambda content: told(content) is not None)
        raise CheckpointError(f"{fault}{why}") from fault.__cause__
    refuse_turned(model, files)
    missing, mismatched = set(info["missing_keys"]), info["mismatched_keys"]
    if mismatched:
        why = _contradictions(config, files, mismatched, lambda content: fits(content, missing))
        _refuse_mismatched(files, mismatched, why)
    spare = {n for n in missing if ".pooler." in f".{n}"}
    if missing - spare:
        _refuse_missing(cls, files, sorted(missing - spare), lambda content: fits(content, spare))
    return Fit(tuple(sorted(info["unexpected_keys"])), tuple(sorted(spare)), model)


def _rehearsed(
    cls: type[PreTrainedModel], config: PreTrainedConfig, files: CheckpointFiles, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The modules on `meta`, and what transformers says of the tensors."""
    empty = {
        n: torch.empty(t.shape, dtype=STORED[t.dtype], device="meta")
        for n, t in files.tensors.items()
        if t.dtype in STORED
    }
    return filled(cls, config, empty, dtype, device_map={"": "meta"}, ignore_mismatched_sizes=True)


def filled(
    cls: type[PreTrainedModel], config: PreTrainedConfig, tensors: dict[str, Any], dtype: torch.dtype, **more: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The modules with these tensors, and what transformers says of them. transformers looks for no file of its own, so
    no index, adapter, pickle or hub id in a config can make it read another. more: arguments of its
    `from_pretrained`."""
    model, info = cls.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, attn_implementation="eager", local_files_only=True,
        output_loading_info=True, **more,
    )  # fmt: skip
    return model, info


def _contradictions(
    config: PreTrainedConfig,
    files: CheckpointFiles,
    mismatched: set[tuple[str, Any, Any]],
    fits: Callable[[dict[str, Any]], bool],
) -> str:
    """The fields of config.json that each alone explain the wrong shapes, and the values they would have to have."""
    shapes = {name: (tuple(stored), tuple(wanted)) for name, stored, wanted in mismatched}
    found = fitting_fields(files.config, config.to_dict(), shapes, fits)
    told = " or ".join(f"{clean(path)} {value}, which would have to be {other}" for path, value, other in found[:3])
    return told or "the config is of another checkpoint"


def cannot(cls: type[PreTrainedModel], files: CheckpointFiles, file: str = "") -> str:
    path, version = clean(str(files.path / file)), transformers.__version__
    return f"{path}: transformers {version} cannot load it as {cls.__name__}"


def _refuse_mismatched(files: CheckpointFiles, mismatched: set[tuple[str, Any, Any]], why: str) -> NoReturn:
    name, stored, wanted = min(mismatched, key=lambda m: m[0])
    entry = files.tensors.get(name)
    where = clean(str(files.path / entry.shard if entry else files.path))
    others = [other for other, *_ in mismatched if other != name]
    raise CheckpointError(
        f"{where}: {shown(name)}: shape mismatch, config.json asks for {list(wanted)}, the file has "
        f"{list(stored)}{f'; so do {listed(others)}' if others else ''}; {why}"
    )


def _refuse_missing(
    cls: type[PreTrainedModel], files: CheckpointFiles, missing: list[str], complete: Callable[[dict[str, Any]], bool]
) -> NoReturn:
    where = clean(str(files.path / files.shards[0] if len(files.shards) == 1 else files.path))
    layers = files.config.get("num_hidden_layers")
    told = f" with num_hidden_layers {layers}" if isinstance(layers, int) else ""
    # If more tensors are missing than present, no single boolean is the reason, and each trial would build all modules.
    why = blamed(files.config, "", complete, kind=bool) if len(missing) <= len(files.tensors) else ""
    raise CheckpointError(
        f"{where}: {plural(len(missing), 'tensor')} of {cls.__name__}{told} missing: {listed(missing)}; "
        f"transformers would fill in random values: fetch the checkpoint again, or correct config.json{why}"
    )
