"""`duat matrix`."""

from __future__ import annotations

import contextlib

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.text import PAPER_PROMPT


class Asked(Options):
    """The block, or all of them, and the prompt."""

    layer: int | None = options.input_option(metavar="I", min=0, help="The block, counted from 0. Default: 0.")
    network: bool = options.input_option(
        help="All blocks instead of one: the paper's W'_{j,1}, W'_{j,2}, W'_{j,3}, b'_{j,2}, b'_{j,3}, and Eq. 21, 23 "
        "and 33 evaluated with them and compared with the model; tokens times width may be at most 4096."
    )
    prompt: list[str] | None = options.input_option(
        metavar="TEXT", help="The text to run; - reads standard input. Default: the paper's own."
    )
    prompts: str | None = options.input_option(
        metavar="FILE",
        help="A file that holds one text, or its token ids, in the forms of duat inspect --prompts.",
    )
    max_tokens: int | None = options.input_option(
        None, "--max-tokens", "--tokens", metavar="N", min=1, help="Cut the prompt after N tokens."
    )
    chat: bool = options.Texts.chat


class Places(Options):
    """Where the report goes, and where the matrices."""

    # unlike other commands', whose FILE holds the report in every form
    form: options.PageFormat | None = options.format_option(
        help="table or json: the report, on standard output; html: a page with pictures, with -o FILE.html. Default: "
        "table, or html when FILE ends in .html.",
    )
    json: bool = options.Page.json
    output: str | None = options.output_option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="FILE.html: write the report as a page with pictures, instead of the table. FILE.safetensors: besides "
        "the report, write W' by its factors (H, V, O, scales), C, the input, what attention adds and the tokens, as "
        "duat inspect --matrices does. To rebuild W': duat explain operator-file. With --network, write all its "
        "matrices, H and scales: duat explain network.",
    )
    dense: bool = options.output_option(
        help="With -o FILE.safetensors: also write W'_HVO, W'_HV and W'_O in full, up to sides of 4096."
    )


@grouped
def matrix(
    model: str | None = options.MODEL,
    *,
    asked: Asked,
    files: options.OneStack,
    loading: options.Loading,
    places: Places,
    voice: options.Voice,
) -> int:
    """The paper's explicit matrices of one block and one prompt, each step checked against the model.

    With --network: of all blocks.

    Exit code: 0 every check holds, 1 a check fails, 2 could not tell.
    """
    from duat_cli.analysis.opening import PromptRequest, open_texts
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.settings import one_input, one_prompt, or_papers
    from duat_cli.api.target import operator_file, tensor_target

    wanted = loading.request(model, Task("matrix"))
    given = files.given()
    texts = or_papers(PromptRequest(asked.prompt, asked.prompts, asked.max_tokens, given, chat=asked.chat))
    talk = talk_of(voice)
    paged = not places.json and _is_page(places.output, places.form)
    report = options.Page(form=places.form, json=places.json, output=places.output if paged else None)
    presentation = Presentation.of(report, voice)
    target = tensor_target("--output", None if paged else places.output, page=True)
    for option, is_given in (("--layer", asked.layer is not None), ("--dense", places.dense)):
        if asked.network and is_given:
            raise InputError(
                f"{option} and --network contradict each other: all blocks are taken and all matrices written"
            )
    if places.dense and target is None:
        raise InputError("--dense: writes W' to a file; give -o FILE.safetensors as well")
    if asked.network and files.stack == "decoder":
        raise InputError(
            "--network: a decoder's cross-attention adds what it reads of the encoder, which Eq. 33 has no matrix for"
        )
    announce(model, talk)
    if texts.made_up and given.option is None:
        talk.note(f"no --prompt given: using the paper's '{PAPER_PROMPT}' where the model reads text")
    with Progress(talk) as progress:
        opened = open_texts(wanted, texts, one_prompt(texts.read(progress)), progress)
        loaded, read = opened.loaded, opened.inputs
        from duat_cli.loading.model.tokenizer import token_texts

        one_input(given, len(read))
        decode = token_texts(loaded, wanted.trust_remote_code)
        if asked.network:
            from duat_cli.analysis.network.run import network

            with contextlib.nullcontext() if target is None else target.replacing() as part:
                layers = network(loaded, read[0], decode, progress, part)
        else:
            from duat_cli.analysis.matrix.run import matrix as compute

            with operator_file(target, decode) as file:
                block = compute(loaded, read[0], asked.layer or 0, decode, progress, file, dense=places.dense)
        if target is not None:
            talk.note(f"wrote {target.path}")

    if asked.network:
        presentation.emit(layers, talk)
        return EXIT_SOUND if layers.certificate.exact else EXIT_FINDINGS
    presentation.emit(block, talk)
    sound = block.certificate.exact and all(check.holds is not False for check in block.checks)
    return EXIT_SOUND if sound else EXIT_FINDINGS


def _is_page(output: str | None, form: options.PageFormat | None) -> bool:
    """Whether the output file is for the report; otherwise it is for the matrices."""
    if output is None or form in ("table", "json"):
        return False
    return output.lower().endswith((".html", ".htm")) or (form == "html" and not output.endswith(".safetensors"))
