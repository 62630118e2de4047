"""`duat lora-diff`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import typer

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import as_rank, processes
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import expanded

if TYPE_CHECKING:
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.results.lora import LoraReport


class Asked(Options):
    """What is compared."""

    prompt: list[str] | None = options.input_option(
        None,
        "--prompt",
        metavar="TEXT",
        help="Also run this text through both models; repeatable; - reads standard input.",
    )
    prompts: str | None = options.Texts.prompts
    default_prompts: bool = options.input_option(
        False,
        "--default-prompts",
        help="Also run the bundled texts through both models; if they read images or sound, a drawn picture or a tone.",
    )
    max_tokens: int | None = options.Texts.max_tokens
    chat: bool = options.Texts.chat
    lint: bool = options.compute_option(
        False, "--lint", help="Only check the adapter for what goes wrong in practice; exit 1 on an error."
    )
    no_base: bool = options.compute_option(
        False, "--no-base", help="Read no tensor of the base: the adapter's own numbers only, in seconds."
    )
    directions: bool = options.compute_option(
        False,
        "--directions",
        help="Also compute what takes long for matrices over 1024 wide: intruders and alignment (seconds each), and "
        "all singular values of dense differences (a minute each).",
    )
    no_cache: bool = options.compute_option(
        False, "--no-cache", help="Neither read nor write directions of base weights in the cache."
    )
    out: str | None = options.OUT


class Loading(options.Loading):
    """Code that comes with a checkpoint is not run."""

    trust_remote_code: Literal[False] = False


@grouped
def lora_diff(
    base: str | None = typer.Argument(
        None,
        metavar="BASE",
        show_default=False,
        help="The base checkpoint: a folder or a hub id. Default: the bundled demo and its adapter.",
    ),
    tuned: str | None = typer.Argument(
        None,
        metavar="TUNED",
        show_default=False,
        help="A PEFT adapter, or a fully tuned checkpoint: a folder, or a hub id (org/name@revision).",
    ),
    other: str | None = typer.Argument(
        None, metavar="OTHER", show_default=False, help="A second adapter, to compare with the first."
    ),
    *,
    asked: Asked,
    files: options.OneStack,
    loading: Loading,
    shown: options.Page,
    wide: bool = options.WIDE,
    every: bool = options.output_option(
        False, "--all", help="Show a row for every changed parameter in the table, instead of one for every kind."
    ),
    voice: options.Voice,
) -> int:
    """What an adapter, or a full fine-tune, really changed: in the weights, and with prompts in every block.

    Exit code: 0 done, 1 not exact, or with --lint the adapter has an error, 2 could not tell.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.lora.run import LoraRequest, texts_to_run
    from duat_cli.analysis.lora.run import lora_diff as compute
    from duat_cli.analysis.opening import PromptRequest

    clock = Clock()
    talk, given = talk_of(voice), files.given()
    presentation = Presentation.of(shown, voice, wide=wide, every=every)
    if asked.out is not None:
        options.refuse_stack(given)
    known = given if asked.out is None else None  # --out stores results of texts alone
    read = PromptRequest(asked.prompt, asked.prompts, asked.max_tokens, known, chat=asked.chat)
    texts = texts_to_run(read, default_prompts=asked.default_prompts)
    request = LoraRequest(
        loading.request(base),
        tuned,
        other,
        texts,
        lint=asked.lint,
        no_base=asked.no_base,
        large=asked.directions,
        cache=not asked.no_cache,
        processes=1 if asked.out is not None else processes(),
    )

    def into(ranks: Ranks, progress: Progress) -> LoraReport | None:
        from duat_cli.analysis.shards.lora import lora_into

        kept = partial(lora_into, expanded(asked.out or ""), request.large, asked.max_tokens, ranks, progress)
        return compute(replace(request, into=kept, gpu=ranks.local), progress, clock.run)

    if asked.out is not None:
        if texts is None:
            raise InputError("--out: keeps the results of prompts; give --prompts FILE, or --default-prompts")
        report = as_rank(base, texts, into, talk)
    else:
        if base is None and texts is None:
            talk.note("no BASE given: using the bundled demo model and its adapter")
        else:
            announce(base, talk)
        with Progress(talk) as progress:
            report = compute(request, progress, clock.run)
    if report is None:
        return EXIT_SOUND  # the first rank has it

    presentation.emit(report, talk)
    return EXIT_SOUND if is_sound(report, asked.lint) else EXIT_FINDINGS


def is_sound(report: LoraReport, lint: bool = False) -> bool:
    """Whether the report is exact, and with `lint` whether the adapter has no error."""
    certified = all(c is None or c.exact for c in (report.certificate, report.tuned_certificate))
    linted = not lint or all(finding.level != "error" for finding in report.lint)
    return certified and linted and (report.eq18 is None or report.eq18.holds is not False)
