"""A checkpoint as a model in memory, or one line that says why not.

transformers only builds the module tree and puts the tensors in. What to read, from where, and whether it
fits is settled before, from the headers (checkpoint.py): first the tree is built without memory and every
name and shape is compared, then the weights are read, then some of them are compared with the file.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.resources
import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from duat_cli.errors import CheckpointError, DuatError, InputError
from duat_cli.models.checkpoint import (
    INDEX,
    WEIGHTS,
    CheckpointFiles,
    TensorEntry,
    counted,
    inspect_folder,
    listed,
    read_json,
    shown,
)
from duat_cli.text import clean, one_line

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "fp64": torch.float64, "float32": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
_HUB_FILES = (
    "config.json", WEIGHTS, INDEX, "model-?????-of-?????.safetensors", *_TOKENIZER_FILES,
    "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip

# safetensors' names, for tensors without memory; every dtype that inspect_folder lets through
_STORED = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip

_COMPARED_TENSORS = 8
_COMPARED_ELEMENTS = 1 << 16
_RANDOM = 0.5  # share of differing values from which a tensor was not loaded at all
_LOG_LINES = 5


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is."""

    path: Path
    """A local folder; for a hub checkpoint its folder in the cache."""
    name: str
    """As the user wrote it; 'demo' for the bundled model."""
    revision: str | None
    """Commit of a hub checkpoint; None for a local folder."""


@dataclass(frozen=True)
class LoadedModel:
    """A model as its checkpoint describes it: eval mode, eager attention, no gradients, every weight read."""

    model: PreTrainedModel
    name: str
    revision: str | None
    files: CheckpointFiles
    dtype: str
    """Of the weights in memory, such as 'float32'."""
    device: str
    warnings: tuple[str, ...]
    """Of the files and of the load, one clean line each."""
    nonfinite_weights: dict[str, int]
    """Parameter -> how many of its values are NaN or infinite; empty for a sound checkpoint."""


def load(
    source: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The model of a folder or a hub id; None is the bundled demo.

    A local folder is read without any network attempt. Raises InputError or CheckpointError, one line.
    """
    asked_dtype, asked_device = parse_dtype(dtype), parse_device(device)
    place = resolve(
        source, revision=revision, token=token, cache_dir=cache_dir, trust_remote_code=trust_remote_code
    )
    files = inspect_folder(place.path, trust_remote_code=trust_remote_code)
    with hushed() as log:
        config = _read_config(files, trust_remote_code)
        cls, notes = _model_class(config, files, trust_remote_code)
        unused, spare = _check_fit(cls, config, files)
        log.clear()  # the rehearsal's lines; the real load repeats what matters
        model = _fill(cls, config, files, asked_dtype or stored_dtype(config, files), asked_device)
    _clear(model, spare)
    unused += compare_with_files(model, files)
    nonfinite, zero = scan_weights(model)
    weights = _weight_notes(nonfinite, zero, model)
    return LoadedModel(
        model=model,
        name=place.name,
        revision=place.revision,
        files=files,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        warnings=(*files.warnings, *notes, *unused, *_foreign_notes(log), *weights),
        nonfinite_weights=nonfinite,
    )


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder. Apart from `load`: a command about weights needs none."""
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{clean(str(path))}: no tokenizer, expected tokenizer.json; needed to read prompts"
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (path / name).exists() or (path / name).is_symlink():
            read_json(path / name)  # transformers does not say which file is broken
    with hushed(), foreign_errors(f"{clean(str(path))}: tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
        tokenizer.truncation_side = "right"  # --max-tokens keeps the beginning, whatever the files prefer
        return tokenizer


def demo_path() -> Path:
    """The bundled demo checkpoint."""
    return Path(str(importlib.resources.files("duat_cli.demo") / "model"))


# --- options ----------------------------------------------------------------------------------------


def parse_dtype(name: str) -> torch.dtype | None:
    """A torch dtype; None for 'auto', which is the stored one."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise InputError(f"--dtype {shown(name)}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """A device that can be used here; 'auto' is cuda if there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device {shown(name)}: expected auto, cpu, cuda, cuda:1 or mps") from error
    try:
        torch.ones(1, device=device).item()  # 'meta' fails as well: it holds no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = one_line(str(error).partition("\n")[0], 160)
        raise InputError(f"--device {shown(name)}: not usable here ({reason}); use --device cpu") from error
    return device


def stored_dtype(config: PreTrainedConfig, files: CheckpointFiles) -> torch.dtype:
    """What --dtype auto means: the dtype that config.json states, else the one of most stored bytes."""
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    sizes: Counter[torch.dtype] = Counter()
    for entry in files.tensors.values():
        if _STORED[entry.dtype].is_floating_point:
            sizes[_STORED[entry.dtype]] += entry.bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


# --- where the checkpoint is -------------------------------------------------------------------------


def resolve(
    source: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """A local folder for what the user named; only a hub id is looked up in the cache, then online."""
    if source is None:
        return Source(demo_path(), "demo", None)
    if not source.strip() or "\0" in source:
        raise InputError(f"MODEL {shown(source)}: expected a folder or a hub id such as org/name")
    if not is_local(source):
        return _download(source, revision, token, cache_dir, trust_remote_code)
    if revision is not None:
        raise InputError(f"--revision {shown(revision)}: {shown(source)} is a local folder, which has none")
    return Source(Path(source).expanduser(), source, None)


def is_local(source: str) -> bool:
    """Whether it can only be a path: it exists, or no hub id looks like it."""
    return os.path.lexists(source) or source.startswith((".", "/", "~")) or source.count("/") > 1


def _download(
    repo: str, revision: str | None, token: str | None, cache_dir: str | None, trust_remote_code: bool
) -> Source:
    """The hub's files in the local cache: config, tokenizer, safetensors; never pickle."""
    import huggingface_hub

    patterns = [*_HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=patterns
        )
    except Exception as error:
        text = _hub_reason(error, revision, cache_dir or huggingface_hub.constants.HF_HUB_CACHE)
        text = text.replace(token, "***") if token else text
        raise CheckpointError(f"{shown(repo)}: {text}") from error
    path = Path(folder)
    if not any((path / name).exists() for name in (WEIGHTS, INDEX)):
        raise CheckpointError(
            f"{shown(repo)}: neither the hub nor the cache has its {WEIGHTS}; pickle is never read: "
            "convert it to safetensors, or use a --revision that holds safetensors"
        )
    return Source(path, repo, path.name)


def _hub_reason(error: Exception, revision: str | None, cache: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "no such folder, and not a hub id, which looks like org/name"
    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its hub page, then give --token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {shown(revision)} on the hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder, and no such repository on the hub; a private one needs --token"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)):
        return (
            f"no such folder, not in the cache {clean(str(cache))}, and the hub is off or out of reach; "
            "go online once, or give a local folder"
        )
    return f"cannot be fetched from the hub: {_reason(error)}"


# --- transformers, kept quiet -------------------------------------------------------------------------


class _Collector(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def hushed() -> Iterator[list[str]]:
    """Collects what transformers and the hub log, as raw text, instead of letting it reach the terminal.

    Their load report prints tensor names unescaped; code that comes with a checkpoint may print as well,
    and standard output is for the result.
    """
    lines: list[str] = []
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    saved = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.handlers, logger.propagate = [_Collector(lines)], False
        transformers_logging.disable_progress_bar()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield lines
    finally:
        for logger, handlers, propagate in saved:
            logger.handlers, logger.propagate = handlers, propagate
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def foreign_errors(what: str, kind: type[DuatError] = CheckpointError) -> Iterator[None]:
    """Another library's exception as one line of ours, a panic of the Rust tokenizers among them."""
    try:
        yield
    except DuatError:
        raise
    except Exception as error:
        raise kind(f"{what}: {_reason(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's; no Exception, and no module to import it from
            raise
        raise kind(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)


def _foreign_notes(log: list[str]) -> list[str]:
    """transformers' warnings but its load report, whose content duat states itself."""
    lines = [one_line(f"transformers: {text}", 300) for text in log if "LOAD REPORT" not in text]
    return list(dict.fromkeys(lines))[:_LOG_LINES]


# --- config and class ---------------------------------------------------------------------------------


def _read_config(files: CheckpointFiles, trust_remote_code: bool) -> PreTrainedConfig:
    where = clean(str(files.path / "config.json"))
    with foreign_errors(f"{where}: refused by transformers {transformers.__version__}"):
        config = AutoConfig.from_pretrained(
            str(files.path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    config.fusion_config = None  # would patch the model's code, and with it the numbers
    return config


def _model_class(
    config: PreTrainedConfig, files: CheckpointFiles, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], list[str]]:
    """The class that config.json names; the base model, with a note, where it names none that is known."""
    names: list[str] = files.config.get("architectures") or []
    if trust_remote_code and files.config.get("auto_map"):
        remote = _remote_class(files, names)
        if remote is not None:
            return remote, []
    for name in names:
        cls = _named_class(name, config)
        if cls is not None:
            return cls, []
    base = _base_class(config, files)
    got = f"{listed(names)} is no {config.model_type} class of transformers" if names else "it names none"
    return base, [f"config.json: architectures: {got}; loaded as {base.__name__}, without a head"]


def _named_class(name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' class of this name, if it is one for this config; text parts stand in their file only."""
    found: Any = getattr(transformers, name, None) or getattr(_modeling_file(config), name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        return None
    cls: Any = found
    made_for = cls.config_class is not None and isinstance(config, cls.config_class)
    return cls if made_for or name in _auto_names(config.model_type) else None


def _modeling_file(config: PreTrainedConfig) -> ModuleType | None:
    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None


def _auto_names(model_type: str) -> set[str]:
    """The class names that any auto class has for a type; some types use another type's classes."""
    tables = [v for k, v in vars(modeling_auto).items() if k.endswith("_MAPPING_NAMES")]
    found = [table[model_type] for table in tables if model_type in table]
    return {name for names in found for name in ([names] if isinstance(names, str) else names)}


def _base_class(config: PreTrainedConfig, files: CheckpointFiles) -> type[PreTrainedModel]:
    if type(config) not in modeling_auto.MODEL_MAPPING:
        where = clean(str(files.path / "config.json"))
        raise CheckpointError(
            f"{where}: architectures: no class for model_type {shown(config.model_type)} is named, and "
            f"transformers {transformers.__version__} has no base model for it"
        )
    found = modeling_auto.MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _remote_class(files: CheckpointFiles, names: list[str]) -> type[PreTrainedModel] | None:
    """The class of the checkpoint's own code; only with --trust-remote-code."""
    auto_map = files.config["auto_map"]
    references = [v for k, v in auto_map.items() if k.startswith("AutoModel") and isinstance(v, str)]
    references.sort(key=lambda reference: reference.rpartition(".")[2] not in names)
    if not references:
        return None
    with foreign_errors(f"{clean(str(files.path))}: auto_map {shown(references[0])}"):
        return get_class_from_dynamic_module(references[0], str(files.path), local_files_only=True)


# --- weights ------------------------------------------------------------------------------------------


def _check_fit(
    cls: type[PreTrainedModel], config: PreTrainedConfig, files: CheckpointFiles
) -> tuple[list[str], list[str]]:
    """Rehearses the load without memory: (notes on unused tensors, missing tensors that do not matter).

    transformers does the renaming and fusing between file and modules, so only it can tell what fits. Tied
    weights and buffers that are computed are no part of what it calls missing. A missing tensor is an error,
    but for the pooler, which encoders are often saved without and which stands behind the last block.
    """
    empty = {n: torch.empty(t.shape, dtype=_STORED[t.dtype], device="meta") for n, t in files.tensors.items()}
    with foreign_errors(_cannot(cls, files)):
        _, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=empty,
            device_map={"": "meta"},
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _refuse_mismatched(files, info["mismatched_keys"])
    missing = set(info["missing_keys"])
    spare = {n for n in missing if ".pooler." in f".{n}"}
    _refuse_missing(cls, files, sorted(missing - spare))
    notes = [f"the file has no pooler, taken as zero: {listed(sorted(spare))}"] if spare else []
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        many = counted(len(unexpected), "unexpected tensor")
        notes.append(f"{many}, unused by {cls.__name__}: {listed(unexpected)}")
    return notes, sorted(spare)


def _clear(model: PreTrainedModel, names: list[str]) -> None:
    """Zero instead of transformers' random values, so that two runs have the same fingerprint."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).zero_()


def _cannot(cls: type[PreTrainedModel], files: CheckpointFiles) -> str:
    path, version = clean(str(files.path)), transformers.__version__
    return f"{path}: transformers {version} cannot load it as {cls.__name__}"


def _refuse_mismatched(files: CheckpointFiles, mismatched: set[tuple[str, Any, Any]]) -> None:
    if not mismatched:
        return
    name, stored, wanted = min(mismatched, key=lambda m: m[0])
    entry = files.tensors.get(name)
    where = clean(str(files.path / entry.shard if entry else files.path))
    others = [other for other, *_ in mismatched if other != name]
    raise CheckpointError(
        f"{where}: {shown(name)}: shape mismatch, config.json asks for {list(wanted)}, the file has "
        f"{list(stored)}{f'; so do {listed(others)}' if others else ''}; the config is of another checkpoint"
    )


def _refuse_missing(cls: type[PreTrainedModel], files: CheckpointFiles, missing: list[str]) -> None:
    if not missing:
        return
    where = clean(str(files.path / files.shards[0] if len(files.shards) == 1 else files.path))
    layers = files.config.get("num_hidden_layers")
    told = f" with num_hidden_layers {layers}" if isinstance(layers, int) else ""
    raise CheckpointError(
        f"{where}: {counted(len(missing), 'tensor')} of {cls.__name__}{told} missing: {listed(missing)}; "
        "transformers would fill in random values: fetch the checkpoint again, or correct config.json"
    )


def _fill(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    files: CheckpointFiles,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with its weights. They are handed over by us, so transformers looks for no file of its own:
    no index, adapter, pickle or hub id in a config can lead it elsewhere."""
    place = {} if device.type == "cpu" else {"device_map": {"": str(device)}}
    with foreign_errors(_cannot(cls, files)), _readers(files) as readers:
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict={n: readers[t.shard].get_slice(n) for n, t in files.tensors.items()},
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            **place,
        )
    if info["error_msgs"]:
        raise CheckpointError(f"{_cannot(cls, files)}: {one_line('; '.join(info['error_msgs']), 300)}")
    model.config.name_or_path = str(files.path)
    model.requires_grad_(False)
    return model.eval()


@contextlib.contextmanager
def _readers(files: CheckpointFiles) -> Iterator[dict[str, Any]]:
    """Shard -> open safetensors file."""
    with contextlib.ExitStack() as stack:
        yield {shard: stack.enter_context(_reader(files.path / shard)) for shard in files.shards}


def _reader(path: Path) -> Any:
    """Reads instead of mapping: a mapped file that shrinks meanwhile kills the process with SIGBUS."""
    try:
        return safe_open(str(path), framework="pt", backend="pread")
    except TypeError:  # safetensors < 0.8 can only map
        return safe_open(str(path), framework="pt")


# --- what was loaded ----------------------------------------------------------------------------------


def compare_with_files(model: PreTrainedModel, files: CheckpointFiles) -> list[str]:
    """Compares some tensors, spread over the model, with the file; notes on those that differ in places.

    A release of transformers (5.12) has reported a clean load of random weights, which is an error here.
    Some classes set the padding row of an embedding to zero, which is a note. Tensors that are fused or
    renamed at load have no equal in the file and are left out.
    """
    notes = []
    pairs = _pairs(model, files)
    _refuse_integers(files, pairs)
    step = -(-len(pairs) // _COMPARED_TENSORS) or 1
    chosen = sorted(pairs)[::step]
    with _readers(files) as readers:
        for name in chosen:
            entry, loaded = pairs[name]
            share = _changed(readers[entry.shard].get_slice(name), loaded)
            if 0 < share <= _RANDOM:
                notes.append(f"{shown(name)}: {share:.2%} of its values are not those of the file")
            if share > _RANDOM:
                raise CheckpointError(
                    f"{clean(str(files.path / entry.shard))}: {shown(name)} was not loaded as stored by "
                    f"transformers {transformers.__version__}; use another release"
                )
    return notes


def _pairs(model: PreTrainedModel, files: CheckpointFiles) -> dict[str, tuple[TensorEntry, Tensor]]:
    """File tensors that stand in the model under the same name, with or without the base model's prefix."""
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    pairs = {}
    for name, entry in files.tensors.items():
        names = (name, prefix + name, name.removeprefix(prefix))
        loaded = next((state[n] for n in names if n in state), None)
        if loaded is not None and tuple(loaded.shape) == entry.shape and entry.elements:
            pairs[name] = (entry, loaded)
    return pairs


def _refuse_integers(files: CheckpointFiles, pairs: dict[str, tuple[TensorEntry, Tensor]]) -> None:
    """Integers in the place of weights are quantised, even where config.json does not say so."""
    for name, (entry, loaded) in pairs.items():
        if loaded.is_floating_point() and not _STORED[entry.dtype].is_floating_point:
            raise CheckpointError(
                f"{clean(str(files.path / entry.shard))}: {shown(name)} is stored as {entry.dtype}: "
                "quantised weights are not supported; give the checkpoint in full precision"
            )


def _changed(stored: Any, loaded: Tensor) -> float:
    """Share of the values that are not the stored ones after the cast; of a long tensor its first rows."""
    shape = stored.get_shape()
    if not shape:
        return _unequal(stored[...], loaded)
    rows = min(shape[0], max(1, _COMPARED_ELEMENTS * shape[0] // loaded.numel()))
    share = _unequal(stored[:rows], loaded[:rows])
    if share <= _RANDOM:
        return share
    # a conversion at load may permute or transpose entries (rotary halves), which keeps the sorted values
    return _unequal(stored[:].flatten().to(loaded.dtype).sort().values, loaded.flatten().sort().values)


def _unequal(stored: Tensor, loaded: Tensor) -> float:
    here = stored.to(loaded.dtype)
    there = loaded.detach().cpu()
    return 1.0 - float(((here == there) | (here.isnan() & there.isnan())).double().mean())


def scan_weights(model: nn.Module) -> tuple[dict[str, int], list[str]]:
    """(parameter -> count of its NaN and infinite values, names of the matrices that are all zero)."""
    nonfinite: dict[str, int] = {}
    zero = []
    for name, parameter in model.named_parameters():
        if not parameter.numel() or not parameter.is_floating_point():
            continue
        low, high = (bound.item() for bound in torch.aminmax(parameter.detach()))  # NaN if any value is
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            nonfinite[name] = int((~torch.isfinite(parameter)).sum())
        elif low == high == 0 and parameter.ndim > 1:
            zero.append(name)
    return nonfinite, zero


def _weight_notes(nonfinite: dict[str, int], zero: list[str], model: nn.Module) -> list[str]:
    notes = []
    if nonfinite:
        total = sum(nonfinite.values())
        where = f"{counted(len(nonfinite), 'tensor')}: {listed(list(nonfinite))}"
        notes.append(f"{counted(total, 'non-finite weight')} (NaN or Inf) in {where}")
    matrices = sum(p.ndim > 1 for p in model.parameters())
    if zero and len(zero) == matrices:
        notes.append(f"all {matrices} weight matrices are zero: shares and densities are undefined")
    elif zero:
        notes.append(f"{len(zero)} of {matrices} weight matrices are all zero: {listed(zero)}")
    return notes
