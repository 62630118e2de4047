"""`duat lora-diff`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, CheckpointError, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.lora.report import Asked
    from duat_cli.cli.shared.session import Found, ModelOptions, PromptOptions
    from duat_cli.cli.terminal.progress import Progress
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.loading.adapter.base_weights import BaseWeights
    from duat_cli.loading.adapter.folder import AdapterFiles
    from duat_cli.results.base import Run
    from duat_cli.results.lora import LoraReport

Base = Annotated[
    str | None,
    typer.Argument(
        metavar="BASE",
        show_default=False,
        help="The base checkpoint: a folder or a hub id. Without any: the bundled demo and its adapter.",
    ),
]
Tuned = Annotated[
    str | None,
    typer.Argument(
        metavar="TUNED",
        show_default=False,
        help="Folder of a PEFT adapter, or of a fully tuned checkpoint.",
    ),
]
Other = Annotated[
    str | None,
    typer.Argument(metavar="OTHER", show_default=False, help="A second adapter, to compare with the first."),
]
Lint = Annotated[
    bool,
    typer.Option(
        "--lint",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Only check the adapter for what goes wrong in practice; exit 1 on an error.",
    ),
]
NoBase = Annotated[
    bool,
    typer.Option(
        "--no-base",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Read no tensor of the base: the adapter's own numbers only, in seconds.",
    ),
]


Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        rich_help_panel=options.PANEL_INPUT,
        help="Also run this text through both models; repeatable; - reads standard input.",
    ),
]
DefaultPrompts = Annotated[
    bool,
    typer.Option(
        "--default-prompts",
        metavar="",
        rich_help_panel=options.PANEL_INPUT,
        help="Also run the bundled texts through both models.",
    ),
]
LargeDirections = Annotated[
    bool,
    typer.Option(
        "--directions",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Also what takes long for matrices over 1024 wide: intruders and alignment (seconds each), and all "
        "singular values of dense differences (a minute each).",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        metavar="",
        rich_help_panel=options.PANEL_COMPUTE,
        help="Neither read nor write directions of base weights in the cache.",
    ),
]


def lora_diff(
    base: Base = None,
    tuned: Tuned = None,
    other: Other = None,
    prompt: Prompts = None,
    prompts: options.PromptsFile = None,
    default_prompts: DefaultPrompts = False,
    max_tokens: options.MaxTokens = None,
    lint: Lint = False,
    no_base: NoBase = False,
    directions: LargeDirections = False,
    no_cache: NoCache = False,
    device: options.Device = "auto",
    dtype: options.DtypeOption = "float32",
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    form: options.FormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """What an adapter, or a full fine-tune, really changed: in the weights, and with prompts in every block.

    Exit code: 0 done, 1 not exact, or with --lint the adapter has an error, 2 could not tell.
    """
    from duat_cli.cli.shared.presentation import Presentation, talk_of
    from duat_cli.cli.shared.session import ModelOptions, PromptOptions
    from duat_cli.cli.terminal.clock import Clock
    from duat_cli.cli.terminal.progress import Progress

    clock = Clock()
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of(output, form, json, no_color, wide=wide)
    if base is not None and tuned is None:
        raise InputError("TUNED missing: give an adapter or a tuned checkpoint behind BASE")
    texts = None
    if prompt or prompts is not None or default_prompts:
        if default_prompts and (prompt or prompts is not None):
            raise InputError("--default-prompts: give either it or prompts of your own")
        if lint or no_base or other is not None:
            raise InputError("prompts run one adapter or checkpoint against its base: no --lint, --no-base or OTHER")
        texts = PromptOptions(prompt, prompts, max_tokens)
    elif max_tokens is not None:
        raise InputError("--max-tokens: there are no prompts; give --prompt, --prompts or --default-prompts")
    wanted = ModelOptions(base, revision, token, cache_dir, False, dtype, device)
    if base is None and texts is None:  # otherwise it is said when the model is opened
        talk.note("no BASE given: using the bundled demo model and its adapter")
    with Progress(talk) as progress:
        report = _Question(wanted, tuned, other, texts, lint, no_base, directions, not no_cache).answer(
            talk, progress, clock.run
        )

    from duat_cli.report.tables.lora import render_lora

    presentation.emit(report, render_lora, talk)
    return EXIT_SOUND if _is_sound(report, lint) else EXIT_FINDINGS


def _is_sound(report: LoraReport, lint: bool) -> bool:
    certified = all(c is None or c.exact for c in (report.certificate, report.tuned_certificate))
    linted = not lint or all(finding.level != "error" for finding in report.lint)
    return certified and linted and (report.eq18 is None or report.eq18.holds is not False)


@dataclass(frozen=True)
class _Question:
    """What is to be compared with what."""

    wanted: ModelOptions
    tuned: str | None
    other: str | None
    texts: PromptOptions | None
    lint: bool
    no_base: bool
    large: bool
    cache: bool

    def answer(self, talk: Talk, progress: Progress, run: Callable[[], Run]) -> LoraReport:
        from duat_cli.loading.adapter.folder import is_adapter

        if self.wanted.model is not None:
            self.wanted.announce(talk)
        found = self.wanted.find(progress)
        tuned = _folder(self.tuned)
        if is_adapter(tuned) or not (tuned / "config.json").exists():
            return self._adapters(found, talk, progress, run)
        if self.other is not None:
            raise InputError(f"OTHER '{self.other}': two adapters can be compared, but '{self.tuned}' is a checkpoint")
        if self.lint or self.no_base:
            option = "--lint" if self.lint else "--no-base"
            raise InputError(f"{option}: is about adapters, but '{self.tuned}' is a checkpoint")
        return self._checkpoint(found, talk, progress, run)

    def _adapters(self, found: Found, talk: Talk, progress: Progress, run: Callable[[], Run]) -> LoraReport:
        adapters = [_adapter(name) for name in (self.tuned, *([self.other] if self.other else []))]
        progress.doing("loading torch")
        from duat_cli.analysis.lora.run import LoraOptions, adapter_report
        from duat_cli.analysis.lora.weight_change import Directions

        directions = Directions(self.large, self.cache)
        options = LoraOptions(read_base=not self.no_base, lint_only=self.lint, directions=directions)
        asked = self._asked(talk, progress)
        report = adapter_report(_weights(found), adapters, options, progress, run)
        if asked is None:
            return report
        from duat_cli.analysis.lora.report import adapter_on_prompts

        return adapter_on_prompts(report, _weights(found), adapters[0], asked, progress, run)

    def _checkpoint(self, found: Found, talk: Talk, progress: Progress, run: Callable[[], Run]) -> LoraReport:
        from duat_cli.loading.checkpoint.preflight import inspect_folder
        from duat_cli.loading.checkpoint.source import Source

        assert self.tuned is not None
        path = _folder(self.tuned)
        files = inspect_folder(path)
        progress.doing("loading torch")
        from duat_cli.analysis.lora.checkpoint_diff import checkpoint_report
        from duat_cli.analysis.lora.weight_change import Directions
        from duat_cli.loading.adapter.base_weights import BaseWeights

        tuned = BaseWeights(Source(path, self.tuned, None), files)
        directions = Directions(self.large, self.cache)
        asked = self._asked(talk, progress)
        report = checkpoint_report(_weights(found), tuned, directions, progress, run)
        if asked is None:
            return report
        progress.doing(f"loading {self.tuned}")
        from duat_cli.analysis.lora.report import checkpoint_on_prompts
        from duat_cli.loading.model.load import load_files

        other = load_files(tuned.source, files, dtype=self.wanted.dtype, device=self.wanted.device)
        return checkpoint_on_prompts(report, asked, other, progress, run)

    def _asked(self, talk: Talk, progress: Progress) -> Asked | None:
        """The base model, and the prompts as its token ids, where there are any: what is wrong there comes first."""
        if self.texts is None:
            return None
        from duat_cli.cli.shared.session import open_session

        loaded, prompts = open_session(self.wanted, self.texts, talk, progress)
        from duat_cli.analysis.lora.report import Asked
        from duat_cli.loading.model.load import load_tokenizer
        from duat_cli.text import clean

        tokenizer = load_tokenizer(loaded.files.path)
        return Asked(loaded, prompts, lambda i: clean(str(tokenizer.decode([i]))))


def _weights(found: Found) -> BaseWeights:
    from duat_cli.loading.adapter.base_weights import BaseWeights

    return BaseWeights(found.place, found.files)


def _folder(name: str | None) -> Path:
    from duat_cli.loading.checkpoint.source import demo_adapter_path

    return demo_adapter_path() if name is None else Path(name).expanduser()


def _adapter(name: str | None) -> AdapterFiles:
    from duat_cli.loading.adapter.folder import open_adapter

    path = _folder(name)
    if name is not None and not path.exists():
        raise CheckpointError(f"{name}: no such folder; adapters and tuned checkpoints are read from local folders")
    return open_adapter(path, name or "demo adapter")
