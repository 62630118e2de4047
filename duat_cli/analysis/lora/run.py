"""`duat lora-diff`: what is compared with what, and the report on it.

torch is imported once the files are known to be there and to agree, so what is wrong with them is said at once;
transformers, only where prompts run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from duat_cli.analysis.opening import Found, ModelRequest, PromptRequest, open_found
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.adapter.folder import AdapterFiles, is_adapter, open_adapter
from duat_cli.loading.importing import uncollected
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.lora.report import Asked
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.adapter.base_weights import BaseWeights
    from duat_cli.loading.checkpoint.source import Source
    from duat_cli.results.base import Run
    from duat_cli.results.lora import LoraReport


@dataclass(frozen=True)
class LoraRequest:
    """What is to be compared with what."""

    base: ModelRequest
    tuned: str | None
    """Folder of an adapter or of a checkpoint; None is the bundled adapter."""
    other: str | None
    """Folder of a second adapter."""
    texts: PromptRequest | None
    """What both models run; None: the weights alone are compared."""
    lint: bool
    """Only the adapter's findings."""
    no_base: bool
    """No tensor of the base is read."""
    large: bool
    """Also the directions that take long."""
    cache: bool


def lora_diff(request: LoraRequest, progress: Progress, run: Callable[[], Run]) -> LoraReport:
    """The report on an adapter, on two, or on a tuned checkpoint; InputError where a checkpoint is given for one."""
    found = request.base.find(progress)
    tuned = _folder(request.tuned)
    if is_adapter(tuned) or not (tuned / "config.json").exists():
        return _adapters(request, found, progress, run)
    if request.other is not None:
        raise InputError(
            f"OTHER '{request.other}': two adapters can be compared, but '{request.tuned}' is a checkpoint"
        )
    if request.lint or request.no_base:
        option = "--lint" if request.lint else "--no-base"
        raise InputError(f"{option}: is about adapters, but '{request.tuned}' is a checkpoint")
    from duat_cli.loading.checkpoint.source import Source

    return _checkpoint(request, found, Source(tuned, request.tuned or str(tuned), None), progress, run)


def _adapters(request: LoraRequest, found: Found, progress: Progress, run: Callable[[], Run]) -> LoraReport:
    adapters = [_adapter(name) for name in (request.tuned, *([request.other] if request.other else []))]
    progress(0, 0, "loading torch")
    with uncollected():
        from duat_cli.analysis.lora.adapter_diff import LoraOptions, adapter_report
        from duat_cli.analysis.lora.weight_change import Directions

    directions = Directions(request.large, request.cache)
    options = LoraOptions(read_base=not request.no_base, lint_only=request.lint, directions=directions)
    asked = _asked(request, found, found, progress)
    report = adapter_report(_weights(found), adapters, options, progress, run)
    if asked is None:
        return report
    from duat_cli.analysis.lora.report import adapter_on_prompts

    return adapter_on_prompts(report, _weights(found), adapters[0], asked, progress, run)


def _checkpoint(
    request: LoraRequest, found: Found, place: Source, progress: Progress, run: Callable[[], Run]
) -> LoraReport:
    from duat_cli.loading.checkpoint.preflight import inspect_folder

    tuned = Found(place, inspect_folder(place.path))
    progress(0, 0, "loading torch")
    with uncollected():
        from duat_cli.analysis.lora.checkpoint_diff import checkpoint_report
        from duat_cli.analysis.lora.weight_change import Directions

    asked = _asked(request, found, tuned, progress)
    directions = Directions(request.large, request.cache)
    report = checkpoint_report(_weights(found), _weights(tuned), directions, progress, run)
    if asked is None:
        return report
    progress(0, 0, f"loading {place.name}")
    from duat_cli.analysis.lora.report import checkpoint_on_prompts
    from duat_cli.loading.model.load import load_files

    paged = asked.loaded.paged is not None
    other = load_files(tuned.place, tuned.files, dtype=request.base.dtype, device=request.base.device, paged=paged)
    return checkpoint_on_prompts(report, asked, other, progress, run)


def _asked(request: LoraRequest, found: Found, other: Found, progress: Progress) -> Asked | None:
    """The base model, and the prompts as its token ids, where there are any: what is wrong there comes first.

    other: whose weights are in memory beside the base's; of an adapter up to as many as the base has.
    """
    if request.texts is None:
        return None
    read = request.texts.read(progress)
    from duat_cli.loading.model.memory import weight_bytes

    base = replace(request.base, beside=weight_bytes(other.files, request.base.dtype))
    loaded, prompts = open_found(base, found, request.texts, read, progress)
    from duat_cli.analysis.lora.report import Asked
    from duat_cli.loading.model.load import load_tokenizer

    tokenizer = load_tokenizer(loaded.files.path)
    return Asked(loaded, prompts, lambda i: clean(str(tokenizer.decode([i]))))


def _weights(found: Found) -> BaseWeights:
    from duat_cli.loading.adapter.base_weights import BaseWeights

    return BaseWeights(found.place, found.files)


def _folder(name: str | None) -> Path:
    from duat_cli.loading.checkpoint.source import demo_adapter_path

    return demo_adapter_path() if name is None else Path(name).expanduser()


def _adapter(name: str | None) -> AdapterFiles:
    path = _folder(name)
    if name is not None and not path.exists():
        raise CheckpointError(f"{name}: no such folder; adapters and tuned checkpoints are read from local folders")
    return open_adapter(path, name or "demo adapter")
