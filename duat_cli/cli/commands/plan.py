"""`duat plan`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from duat_cli.cli.commands.lora_diff import DefaultPrompts
from duat_cli.cli.commands.prune_bound import Granularity, Holdout, Measure, MetricOption, Probes, parse_kinds
from duat_cli.cli.shared import options, pruning
from duat_cli.errors import EXIT_SOUND, EXIT_UNDECIDED, InputError
from duat_cli.kinds import apart

TOKENS_LIMIT = 1_000_000  # prompts; more would only fill the memory

For = Annotated[
    Literal["inspect", "verify", "matrix", "prune-bound", "lora-diff", "check", "attribute", "compare"],
    options.compute_option(
        "--for", metavar="COMMAND", help="inspect, verify, matrix, prune-bound, lora-diff, check, attribute or compare."
    ),
]
Time = Annotated[
    bool,
    options.compute_option(
        "--time",
        metavar="",
        help="Also about how long it takes, from one matrix product and one read that are timed here.",
    ),
]
Tuned = Annotated[
    str | None,
    options.input_option(
        "--tuned",
        metavar="TUNED",
        show_default=False,
        help="For lora-diff: the adapter or the tuned checkpoint. Default: the bundled adapter.",
    ),
]
Policy = Annotated[
    str | None, options.compute_option("--policy", metavar="POLICY", help="For check: as of duat check.")
]
Select = Annotated[
    list[str] | None, options.compute_option("--select", metavar="RULE", help="For check: as of duat check.")
]
Position = Annotated[
    Literal["all"] | None,
    options.compute_option("--position", metavar="all", help="For attribute: a target for each token."),
]
Steps = Annotated[
    int, options.compute_option("--steps", metavar="N", min=0, help="For attribute: as of duat attribute.")
]
Fixed = Annotated[bool, options.compute_option("--fixed", metavar="", help="For compare: as of duat compare.")]
Null = Annotated[
    Literal["all", "uniform"], options.compute_option("--null", metavar="WHICH", help="As of duat inspect.")
]
Device = Annotated[
    str,
    options.loading_option(
        "--device", metavar="DEVICE", help="cpu, or cuda: of a GPU's memory; with --memory it need not be there."
    ),
]
Tokens = Annotated[
    str | None,
    options.input_option(
        "--tokens",
        metavar="LIST",
        help="In place of texts, their numbers of tokens, such as 512 or 100x32,2048; no tokenizer is read.",
    ),
]


def plan(
    model: options.Model = None,
    command: For = "inspect",
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    tokens: Tokens = None,
    null: Null = "all",
    tuned: Tuned = None,
    default_prompts: DefaultPrompts = False,
    holdout: Holdout = None,
    granularity: Granularity = None,
    metric: MetricOption = None,
    effort: pruning.EffortOption = "default",
    probes: Probes = None,
    measure: Measure = None,
    repair: pruning.Repair = False,
    calibration: pruning.Calibration = None,
    policy: Policy = None,
    select: Select = None,
    position: Position = None,
    steps: Steps = 0,
    fixed: Fixed = False,
    time: Time = False,
    device: Device = "cpu",
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    form: options.PageFormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """How much memory a command will take, and whether its weights fit or are read block by block.

    From config.json and the headers of the weight files alone; with --time also about how long. Exit code: 0 it can
    run, 2 it cannot.
    """
    from duat_cli.analysis.clock import Clock
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.plan.task import PruneOptions, Task, effort_of
    from duat_cli.api.planning import PlanRequest, plan_report, task_of
    from duat_cli.api.settings import one_question
    from duat_cli.cli.shared.many import processes
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress

    for of, option, given in (
        ("inspect", "--null", null != "all"),
        ("compare", "--fixed", fixed),
        ("attribute", "--position", position),
        ("attribute", "--steps", steps),
        ("check", "--policy", policy),
        ("check", "--select", select),
        ("lora-diff", "--tuned", tuned),
        ("lora-diff", "--default-prompts", default_prompts),
        ("prune-bound", "--granularity", granularity),
        ("prune-bound", "--metric", metric),
        ("prune-bound", "--effort", effort != "default"),
        ("prune-bound", "--probes", probes is not None),
        ("prune-bound", "--measure", measure is not None),
        ("prune-bound", "--repair", repair),
        ("prune-bound", "--calibration", calibration),
        ("prune-bound", "--holdout", holdout),
    ):
        if given and of != command:
            raise InputError(f"{option}: is of --for {of}, not of {command}")
    one_question(None, None, position, steps, None)
    pruning.require_repair(calibration, repair)
    limit, kinds = options.parse_memory(memory), parse_kinds(granularity)
    probes, measure = effort_of(effort, probes, measure)
    task = Task(
        command,
        processes=processes(),
        reinitialised=null == "all",
        pruning=PruneOptions(kinds, metric, probes, measure, repair=repair, joint=apart(kinds), effort=effort),
        every_position=position is not None,
        steps=steps,
        fixed=fixed,
    )
    request = PlanRequest(
        model=ModelRequest(model, revision, token, cache_dir, False, dtype, "cpu", limit),
        texts=PromptRequest(prompt, prompts, max_tokens, chat=chat),
        tokens=_parse_tokens(tokens),
        task=task_of(task, policy, select or [], dtype),
        tuned=tuned,
        default_prompts=default_prompts,
        holdout=holdout,
        calibration=calibration,
        time=time,
        device=device,
    )
    talk = talk_of(quiet, verbose, no_color)
    presentation = Presentation.of_page(output, form, json, no_color)
    clock = Clock()

    announce(model, talk)
    with Progress(talk) as progress:
        report = plan_report(request, clock, progress)

    from duat_cli.report.tables.plan import render_plan

    presentation.emit(report, render_plan, talk)
    return EXIT_UNDECIDED if report.chosen is None else EXIT_SOUND


def _parse_tokens(text: str | None) -> list[int] | None:
    """'2x32,512' as [32, 32, 512]; None stays None."""
    if text is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,7})x)?(\d{1,7})\s*", part, re.ASCII)
        if match is None or int(match[2]) == 0:
            raise InputError(f"--tokens '{text}': '{part}' is no number of tokens; expected such as 512 or 100x32")
        times = int(match[1] or 1)
        if len(counts) + times > TOKENS_LIMIT:
            raise InputError(f"--tokens '{text}': more than {TOKENS_LIMIT} prompts")
        counts += [int(match[2])] * times
    if not counts:
        raise InputError(f"--tokens '{text}': no prompt")
    return counts
