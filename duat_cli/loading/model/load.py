"""A checkpoint as a model in memory, or one line that says why not.

transformers only builds the module tree and puts the tensors in. The tree is built without memory, and every name and
shape is compared with the headers. Then the weights are read, and some of them are compared with the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from duat_cli.compat.libc import small_blocks_returned
from duat_cli.compat.transformers import OnDevice, as_weights_are, load_part, targets_of
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.checkpoint.dtypes import SHORT, SIZES, auto_dtype, no_dtype
from duat_cli.loading.checkpoint.preflight import CONFIG, CheckpointFiles, inspect_folder
from duat_cli.loading.checkpoint.reader import Reader
from duat_cli.loading.checkpoint.source import Source, resolve
from duat_cli.loading.checkpoint.stored import STORED
from duat_cli.loading.inputs.request import StackName
from duat_cli.loading.model.blame import blamed
from duat_cli.loading.model.device_map import Placed
from duat_cli.loading.model.fingerprint import Digest, combined, saved
from duat_cli.loading.model.gpu import NO_FLOAT64, full_precision, give_back_gpu_memory, lacks_float64
from duat_cli.loading.model.memory import require_memory
from duat_cli.loading.model.model_class import Fit, cannot, check_fit, check_model_type, filled, model_class
from duat_cli.loading.model.notes import weight_notes
from duat_cli.loading.model.weights_check import Scan, Sight, compare_with_files, refuse_integers
from duat_cli.loading.paged.initialised import initialise
from duat_cli.loading.paged.layout import layout
from duat_cli.loading.paged.pager import Look, Pager
from duat_cli.loading.paged.ties import tie_equal
from duat_cli.loading.quiet import foreign_errors, foreign_notes, hushed
from duat_cli.text import clean, one_line, shown

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, SHORT.get(name, name)) for name in (*SIZES, *SHORT)}


@dataclass(frozen=True)
class LoadedModel:
    """A model as its checkpoint describes it: eval mode, eager attention, no gradients, every weight read."""

    model: PreTrainedModel
    name: str
    revision: str | None
    files: CheckpointFiles
    dtype: str
    """Dtype of the weights in memory, such as 'float32'."""
    device: str
    warnings: tuple[str, ...]
    """Warnings about the files and the load, one clean line each."""
    nonfinite_weights: dict[str, int]
    """Parameter -> how many of its values are NaN or infinite; empty for a sound checkpoint."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the files that the class does not use."""
    spare: tuple[str, ...] = ()
    """Missing tensors that do not matter, taken as zero."""
    paged: PagedWeights | None = None
    """The pager and its findings, where one block's weights are in memory at a time; otherwise None."""
    memory: int | None = None
    """Bytes that the process may take; None for what the system leaves."""
    planned_memory: int | None = None
    """Bytes that the process was planned to take at most."""
    processes: int = 1
    """Number of processes that were planned to share the prompts."""
    waiting: int | None = None
    """Bytes of the passes that were planned to wait for the next block at the same time, where there may be many."""
    like: Mapping[str, Tensor] | None = None
    """Inputs of the shapes that the model reads, for its discovery, where it reads no token ids."""
    stack: StackName | None = None
    """The stack that --stack named, of which `model` is the part."""
    chain: str | None = None
    """The list of blocks that --stack named, where `model` runs several such lists in one pass."""
    every_stack: bool = False
    """Whether the other stacks of the model have reports of their own, by --stack all."""
    whole: PreTrainedModel | None = None
    """The model that `model` is a part of, by --stack."""
    pair: PreTrainedModel | None = None
    """The encoder-decoder that `model`, a decoder, belongs to; its head reads the decoder's output."""

    @property
    def reads_tokens(self) -> bool:
        """Whether the model reads token ids. Positions of a picture or a sound, which some models read instead, have no
        text."""
        return self.like is None or "input_ids" in self.like

    @property
    def named(self) -> PreTrainedModel:
        """The model whose modules have the names used in the files: `model`, or with --stack the model it is a part
        of."""
        return self.whole or self.headed

    @property
    def headed(self) -> PreTrainedModel:
        """The model with the head: `model`, or the encoder-decoder that it is the decoder of."""
        return self.pair or self.model

    def bring(self, module: nn.Module) -> None:
        """Brings the weights of this module into memory, if weights are read block by block."""
        if self.paged is not None:
            self.paged.pager.bring(module)

    def value_notes(self) -> list[str]:
        """Notes on values that `warnings` lacks, if weights are read block by block. All weights that are left are read
        now."""
        if self.paged is None:
            return []
        self.paged.pager.complete()
        return weight_notes(self.paged.scan.nonfinite, self.paged.scan.zero, self.paged.matrices)


class Edit(Protocol):
    """A change of weights that are read block by block."""

    def prepare(self, model: Any) -> None:
        """Called with the model before any weight is read."""

    def changes(self, parameter: str) -> bool:
        """Whether that parameter of the model is changed."""

    def put(self, model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> None:
        """Called in place of `load_part`."""


@dataclass(frozen=True)
class PagedWeights:
    """Weights that are read while the model runs, and what was found in those read so far."""

    pager: Pager
    scan: Scan
    digests: dict[str, bytes]
    """Parameter or saved buffer -> its part of the fingerprint."""
    matrices: int
    kept: int = 0
    """Bytes of weights that, once read, stay in the memory of the device that computes."""

    def fingerprint(self, model: Any) -> str:
        """The fingerprint of all weights of the model, or of a part of it. Weights that no pass has asked for are read
        now."""
        self.pager.complete()
        return combined(self.pager.within(model, self.digests))


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
    parse_dtype(dtype)  # options are refused before anything is read or fetched
    parse_device(device)
    place = resolve(source, revision=revision, token=token, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    files = inspect_folder(place.path)
    return load_files(place, files, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def load_files(
    place: Source,
    files: CheckpointFiles,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    paged: bool = False,
    edit: Edit | None = None,
    placed: Placed | None = None,
) -> LoadedModel:
    """The model of files that are found and checked.

    paged: whether only one block's weights, and those that `placed` keeps, are in memory at a time. edit: a change of
    the weights as they are read; notes on weights are about the files' own.
    """
    asked_dtype, asked_device = parse_dtype(dtype), parse_device(device)
    check_model_type(files, trust_remote_code)
    if asked_device.type == "cpu" and not paged:
        require_memory(files, dtype)
    with hushed() as log:
        config = _read_config(files, trust_remote_code)
        cls, notes = model_class(config, files, trust_remote_code)
        real_dtype = asked_dtype or DTYPES[auto_dtype(files)]
        fit = check_fit(cls, config, files, real_dtype)
        log.clear()  # the rehearsal's lines; the real load repeats what matters
        model = fit.model if paged else _fill(cls, config, files, real_dtype, asked_device)
        model.config.name_or_path = str(files.path)
        settle(model, asked_device)
    scan, pages, matrices = Scan(), None, sum(p.ndim > 1 for p in model.parameters())
    if paged:
        refuse_integers(model, files)
        copies = tie_equal(model, files)
        if edit is not None:
            edit.prepare(model)
        pages = _paged(model, cls, config, files, fit, scan, str(asked_device), edit, placed, copies)
        changed, found = [], []
    else:
        give_back_gpu_memory(str(asked_device))  # memory of tensors that were cast there
        _clear(model, fit.spare)
        changed = compare_with_files(model, files)
        for name, parameter in model.named_parameters():
            scan.see(name, parameter)
        found = weight_notes(scan.nonfinite, scan.zero, matrices)
    return LoadedModel(
        model=model,
        name=place.name,
        revision=place.revision,
        files=files,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(asked_device if paged else model.device),
        warnings=(*files.warnings, *notes, *fit.notes(cls, files), *changed, *foreign_notes(log), *found),
        nonfinite_weights=scan.nonfinite,
        unexpected=fit.unexpected,
        spare=fit.spare,
        paged=pages,
    )


def fit_of(files: CheckpointFiles, dtype: str, trust_remote_code: bool) -> Fit:
    """The fit of config.json and the headers. CheckpointError where they contradict each other. No value is read."""
    check_model_type(files, trust_remote_code)
    with hushed():
        config = _read_config(files, trust_remote_code)
        cls, _ = model_class(config, files, trust_remote_code)
        return check_fit(cls, config, files, parse_dtype(dtype) or DTYPES[auto_dtype(files)])


def skeleton(files: CheckpointFiles, trust_remote_code: bool = False) -> PreTrainedModel:
    """The checkpoint's modules without memory: names, shapes and classes."""
    check_model_type(files, trust_remote_code)
    with hushed():
        config = _read_config(files, trust_remote_code)
        cls, _ = model_class(config, files, trust_remote_code)
        with foreign_errors(cannot(cls, files)), torch.device("meta"):
            return cls(config)


def class_of(files: CheckpointFiles, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that the checkpoint is loaded as."""
    check_model_type(files, trust_remote_code)
    with hushed():
        return model_class(_read_config(files, trust_remote_code), files, trust_remote_code)[0]


def parse_dtype(name: str) -> torch.dtype | None:
    """A torch dtype; None for 'auto', the dtype as stored."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise no_dtype(name)
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """A device that can be used here; 'auto' is cuda if there is one, else cpu. A GPU comes with its number, because
    'cuda' alone means another GPU in another thread, and transformers loads in several threads."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise InputError(f"--device {shown(name)}: expected auto, cpu, cuda or cuda:1") from error
    try:
        torch.ones(1, device=device).item()  # 'meta' fails as well: it holds no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = one_line(str(error).partition("\n")[0], 160)
        raise InputError(f"--device {shown(name)}: not usable here ({reason}); use --device cpu") from error
    if lacks_float64(device):
        raise InputError(f"--device {shown(name)}: {NO_FLOAT64}; use --device cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _read_config(files: CheckpointFiles, trust_remote_code: bool) -> PreTrainedConfig:
    where = clean(str(files.path / CONFIG))
    try:
        with foreign_errors(f"{where}: refused by transformers {transformers.__version__}"):
            found = str(files.path)
            config = AutoConfig.from_pretrained(found, local_files_only=True, trust_remote_code=trust_remote_code)
    except CheckpointError as fault:
        raise CheckpointError(f"{fault}{blamed(files.config, str(fault.__cause__), _is_config)}") from fault.__cause__
    return as_weights_are(config)


def _is_config(content: dict[str, Any]) -> bool:
    try:
        CONFIG_MAPPING[content["model_type"]].from_dict(content)
    except Exception:  # each refusal has an error of its own
        return False
    return True


def _fill(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    files: CheckpointFiles,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with its weights."""
    place = {} if device.type == "cpu" else {"device_map": {"": str(device)}}
    with foreign_errors(cannot(cls, files)), small_blocks_returned(), Reader(files, threads=True) as reader:
        unread = {name: OnDevice(one, str(device)) for name, one in reader.each().items()}
        model, info = filled(cls, config, unread, dtype, **place)
    if info["error_msgs"]:
        raise CheckpointError(f"{cannot(cls, files)}: {one_line('; '.join(info['error_msgs']), 300)}")
    return model


def settle(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the model ready to run: no gradients, no dropout, experts computed in a way that supports this dtype, and
    float32 convolutions on a GPU in full precision."""
    if device.type == "cuda":
        full_precision()
    if not _grouped_kernel_knows(model.dtype, device) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the model's own loop; nothing changes where it has no experts
    model.requires_grad_(False)
    model.eval()


def _grouped_kernel_knows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel that transformers uses for routed experts (`grouped_mm`) computes in this dtype. A call finds
    out, because torch lists neither dtypes nor devices."""
    one = torch.zeros(16, 16, dtype=dtype, device=device)  # it demands multiples of 16 bytes for rows and columns
    try:
        torch.nn.functional.grouped_mm(one, one[None], offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _paged(
    model: PreTrainedModel,
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    files: CheckpointFiles,
    fit: Fit,
    scan: Scan,
    device: str,
    edit: Edit | None,
    placed: Placed | None,
    copies: Collection[str],
) -> PagedWeights:
    """The weights of a model on `meta`, read as they are needed. copies: tensors of the files that are not read,
    because they equal others that their parameters are tied to."""
    digests: dict[str, bytes] = {}
    matrices = sum(p.ndim > 1 for p in model.parameters())
    covered = {name for name, _ in saved(model)}

    def see(name: str, value: Tensor) -> list[Look]:
        if edit is not None or name not in covered:  # a tied weight counts under its first name
            return []
        found: list[Look] = [Digest(name, value, digests)]
        return [*found, Sight(name, value, scan)] if isinstance(value, torch.nn.Parameter) else found

    stored = [name for name, entry in files.tensors.items() if entry.dtype in STORED and name not in copies]
    with hushed(), foreign_errors(cannot(cls, files)):
        steps = initialise(model, cls, config, device)
        targets = targets_of(model, stored)
        targets = {n: (to, new or to in steps or files.tensors[n].made is not None) for n, (to, new) in targets.items()}
        if edit is not None:  # a changed weight is not stored in the form in which it is used
            targets = {name: (target, new or edit.changes(target)) for name, (target, new) in targets.items()}
        pages = layout(model, targets)
    put = load_part if edit is None else edit.put
    homes = {} if placed is None else placed.homes(model, pages[1:], targets, files)
    reader = Reader(files, homes, threads=True)
    pager = Pager(
        model, pages, reader, zero=fit.spare, steps=steps, dtype=model.dtype, device=device, see=see, load=put
    )
    pager.freed = give_back_gpu_memory
    kept = sum(files.tensors[name].read_bytes for name, place in homes.items() if place == device)
    return PagedWeights(pager, scan, digests, matrices, kept)


def _clear(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    """Sets parameters to zero in place of transformers' random values, so that two runs have the same fingerprint."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).zero_()
