"""`duat check`."""

from __future__ import annotations

import functools
import os
from typing import Annotated

from duat_cli.cli.shared import options
from duat_cli.cli.shared.outlets import CheckForm, Outlets
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

PANEL_CHECK = "What to check"
check_option = functools.partial(options.option, panel=PANEL_CHECK)

PolicyOption = Annotated[
    str | None,
    check_option(
        "--policy",
        metavar="FILE",
        help="A TOML file, a pyproject.toml with [tool.duat], or a shipped policy: default, strict, release, adapter. "
        "Default: [tool.duat] of ./pyproject.toml if it has one, else 'default'.",
    ),
]
BaselineOption = Annotated[
    str | None,
    check_option(
        "--baseline", metavar="FILE", help="Compare with this baseline; what moved beyond its tolerance fails."
    ),
]
UpdateOption = Annotated[
    bool,
    check_option(
        "--update-baseline", metavar="", help="Write the baseline anew, and say what changed; not where a check fails."
    ),
]
AdapterOption = Annotated[
    str | None,
    check_option(
        "--adapter",
        metavar="ADAPTER",
        help="Also check a PEFT adapter of this model, a folder or a hub id (org/name@revision): the rules adapter.*.",
    ),
]
SelectOption = Annotated[
    list[str] | None,
    check_option("--select", metavar="RULE", help="Only these rules, such as 'integrity.*'; repeatable."),
]
WeightsOnly = Annotated[
    bool,
    check_option(
        "--weights-only", metavar="", help="Only what the files say: no tokenizer, no forward pass, no torch."
    ),
]
FormOption = Annotated[
    CheckForm | None,
    options.output_option(
        "--format",
        metavar="FORMAT",
        show_default=False,
        help="table, json, junit, github (annotations), markdown, sarif, html (a page with pictures), or for the hub "
        "eval-results (YAML for a model card's metadata) and model-card (a section for it). Default: by the suffix of "
        "the output file (.json .xml .md .sarif .html), else table.",
    ),
]
ReportOption = Annotated[
    list[str] | None,
    options.output_option(
        "--report", metavar="FORMAT=FILE", help="Also write this report, such as sarif=duat.sarif; repeatable."
    ),
]
EveryOption = Annotated[
    bool,
    options.output_option(
        "--all", metavar="", help="List every finding and every effect of a cause, in the table and in Markdown."
    ),
]


def check(
    model: options.Model = None,
    policy: PolicyOption = None,
    baseline: BaselineOption = None,
    update_baseline: UpdateOption = False,
    weights_only: WeightsOnly = False,
    adapter: AdapterOption = None,
    select: SelectOption = None,
    prompt: options.Prompts = None,
    prompts: options.PromptsFile = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    image: options.Images = None,
    audio: options.Sounds = None,
    tensors: options.InputTensors = None,
    stack: options.Stack = None,
    decoder_prompt: options.DecoderPrompt = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: FormOption = None,
    json: options.Json = False,
    output: options.Output = None,
    report: ReportOption = None,
    every: EveryOption = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """A gate: is the checkpoint sound, does it keep a policy's bounds, and did it drift from its baseline?

    Exit code: 0 all checks passed (warnings allowed), 1 a check failed, 2 could not tell.
    """
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.cli.shared.many import processes
    from duat_cli.cli.shared.presentation import announce, talk_of
    from duat_cli.cli.terminal.output import Target
    from duat_cli.cli.terminal.progress import Progress

    with Outlets(model) as outlets:
        talk = talk_of(quiet, verbose, no_color)
        outlets.open(form, json, output, report or [], no_color)
        _refuse_no_model(model)
        limit = options.parse_memory(memory)
        from duat_cli.analysis.check.run import CheckRequest
        from duat_cli.analysis.check.run import check as compute
        from duat_cli.analysis.clock import Clock
        from duat_cli.checks.verdict.conclude import plan

        wanted = ModelRequest(
            model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, device_map=device_map
        )
        files = options.input_files(image, audio, tensors, stack, decoder_prompt)
        request = CheckRequest(
            wanted, PromptRequest(prompt, prompts, max_tokens, files, chat=chat), adapter, processes()
        )
        clock = Clock()
        settled = plan(policy, select or [], baseline, update_baseline, weights_only, dtype)
        file = Target.of("--baseline", baseline) if update_baseline else None
        announce(model, talk)
        with Progress(talk) as progress:
            result, text = compute(settled, request, progress, clock.run)
            if file is not None and text is not None:
                file.write(text)
        outlets.write(result, every, talk)
    return EXIT_SOUND if result.verdict == "passed" else EXIT_FINDINGS


def _refuse_no_model(model: str | None) -> None:
    """A job whose variable is empty would pass, on the bundled demo."""
    if model is None and any(os.environ.get(name) for name in ("CI", "PRE_COMMIT")):
        raise InputError("MODEL missing: a gate does not fall back to the bundled demo; give a folder or a hub id")
