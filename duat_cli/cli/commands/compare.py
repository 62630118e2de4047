"""`duat compare`."""

from __future__ import annotations

from typing import Annotated, Literal

from duat_cli.cli.shared import options
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError

Prompts = Annotated[
    list[str] | None,
    options.input_option(
        "--prompt",
        metavar="TEXT",
        help="A text to run; give two, or more, of which the first is compared with each other one; - reads standard "
        "input. Without any: the paper's two.",
    ),
]
PairsFile = Annotated[
    str | None,
    options.input_option(
        "--prompts",
        metavar="FILE",
        help='Many pairs: JSON lines {"a": ..., "b": ...} in a .jsonl file; with .gz behind it, compressed; - reads '
        "standard input.",
    ),
]
Shared = Annotated[
    str | None,
    options.input_option(
        "--shared", metavar="TEXT", help="One text behind several contexts (--prefix); its tokens alone are compared."
    ),
]
Prefixes = Annotated[
    list[str] | None,
    options.input_option(
        "--prefix",
        metavar="TEXT",
        help="A context in front of --shared, on a line of its own; repeatable. One is compared with the text alone, "
        "several with the first of them.",
    ),
]
AnswerText = Annotated[
    str | None,
    options.input_option(
        "--answer",
        metavar="TEXT",
        help="With --shared as a question and every --prefix as a demonstration: the answer, whose loss is taken with "
        "none, each and all of them.",
    ),
]
Align = Annotated[
    Literal["text", "position"],
    options.compute_option(
        "--align",
        metavar="HOW",
        help="Which tokens are compared: those that both prompts have (text), or each with the one at its place "
        "(position), for prompts of as many tokens that differ in a word.",
    ),
]
Fixed = Annotated[
    bool,
    options.compute_option(
        "--fixed",
        metavar="",
        help="Instead: what dynamic parameters buy. The loss with attention weights, then norm scales too, held at the "
        "prompt's own values, another prompt's, and the mean; prompts of equal length, or the bundled set.",
    ),
]
PerPrompt = Annotated[bool, options.compute_option("--per-prompt", metavar="", help="Also the values of each pair.")]
NoCache = Annotated[
    bool, options.compute_option("--no-cache", metavar="", help="Neither read nor write the cache of Gram matrices.")
]


def compare(
    model: options.Model = None,
    prompt: Prompts = None,
    prompts: PairsFile = None,
    shared: Shared = None,
    prefix: Prefixes = None,
    answer: AnswerText = None,
    max_tokens: options.MaxTokens = None,
    chat: options.Chat = False,
    layers: options.Layers = None,
    align: Align = "text",
    fixed: Fixed = False,
    per_prompt: PerPrompt = False,
    no_cache: NoCache = False,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.DtypeOption = "float32",
    memory: options.Memory = None,
    revision: options.Revision = None,
    token: options.Token = None,
    cache_dir: options.CacheDir = None,
    trust_remote_code: options.TrustRemoteCode = False,
    form: options.PageFormatOption = None,
    json: options.Json = False,
    output: options.Output = None,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """Which parameters follow the input: two prompts through one model, W', biases and terms of every block compared.

    Two checkpoints are compared by duat lora-diff.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.compare.request import texts_of
    from duat_cli.analysis.opening import ModelRequest, PromptRequest, load_found, open_session, tokens_of
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import beside_shared, blocks_of
    from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
    from duat_cli.cli.terminal.progress import Progress

    limit = options.parse_memory(memory)
    task = Task("compare", fixed=fixed)
    wanted = ModelRequest(model, revision, token, cache_dir, trust_remote_code, dtype, device, limit, task, device_map)
    talk = talk_of(quiet, verbose, no_color)
    chosen = blocks_of(layers)
    presentation = Presentation.of_page(output, form, json, no_color, wide=wide)
    beside_shared(max_tokens, align, shared)
    if fixed and (
        shared is not None or prefix or answer is not None or chosen is not None or per_prompt or align != "text"
    ):
        raise InputError("--fixed: takes --prompt or --prompts, and no option of a comparison")
    texts = None if fixed else texts_of(prompt, prompts, shared, prefix, answer, chat=chat)
    if not fixed and not prompt and prompts is None and shared is None:
        talk.note("no prompts given: using the paper's own two")

    announce(model, talk)
    with Progress(talk) as progress:
        if texts is None:
            own = PromptRequest(prompt, prompts, max_tokens, chat=chat)
            loaded, encoded = open_session(wanted, own, progress)
            from duat_cli.analysis.compare.fixed import fixed as compute_fixed

            report = compute_fixed(loaded, encoded, own.own, progress)
        else:
            read = PromptRequest([text.text for text in texts.texts], None, max_tokens)
            loaded, tokenizer = load_found(wanted, wanted.find(progress), read, texts.texts, progress)
            loaded, encoded = tokens_of(loaded, tokenizer, read, texts.texts)
            from duat_cli.analysis.compare.run import CompareOptions, Vocabulary
            from duat_cli.analysis.compare.run import compare as compute
            from duat_cli.loading.prompts import said

            words = Vocabulary(lambda ids: said(tokenizer, ids, "--prompt: "), frozenset(tokenizer.all_special_ids))
            asked = CompareOptions(chosen, per_prompt, not no_cache, align == "position")
            report = compute(loaded, texts, encoded, asked, words, progress)

    from duat_cli.report.tables.compare import render_compare

    presentation.emit(report, render_compare, talk)
    sound = report.certificate.exact and (report.fixed is None or report.fixed.holds)
    return EXIT_SOUND if sound else EXIT_FINDINGS
