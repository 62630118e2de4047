"""`duat inspect`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options, grouped
from duat_cli.cli.shared.many import as_rank, processes, settle
from duat_cli.cli.shared.presentation import Presentation, announce, talk_of
from duat_cli.cli.terminal.progress import Progress
from duat_cli.errors import EXIT_FINDINGS, EXIT_SOUND, InputError
from duat_cli.kinds import Extra
from duat_cli.loading.inputs.request import EVERY
from duat_cli.text import expanded

if TYPE_CHECKING:
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.save.asked import Saved
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.api.target import FileTarget
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt
    from duat_cli.results.inspect import InspectReport


class Asked(Options):
    """What is computed and written."""

    layers: str | None = options.LAYERS
    threshold: float = options.compute_option(
        0.01,
        metavar="X",
        help="An entry of W' counts for the density if it is above X times the root mean square entry.",
    )
    conv_width: int = options.compute_option(
        3, metavar="K", min=1, help="Width of the 1-D convolution that the density is compared with."
    )
    spectrum: bool = options.compute_option(help="Also report the spectral norm and stable rank of W'.")
    terms: bool = options.compute_option(help="Also report every UAT term's share of the last output.")
    end_to_end: bool = options.compute_option(
        help="Also report how tokens of the first block's input reach the last output through all blocks, compared "
        "with uniform attention. It takes as much work as two more passes for each token."
    )
    routing: bool = options.compute_option(
        help="Also report where attention weights come from: W_QK of every head, and what explains the scores."
    )
    heads: bool = options.compute_option(
        help="Also report what each attention head reads: the first token, the previous one, an equal one or the one "
        "behind an equal one (induction); how many tokens and how far away. Compared with uniform attention."
    )
    per_prompt: bool = options.compute_option(help="Also report the values and spreads over the prompts.")
    matrices: str | None = options.compute_option(
        metavar="FILE",
        help="Write every block's W' by its factors (H, V, O, scales), C, inputs and tokens to a .safetensors file, "
        "block by block. A block takes heads x N x N x 4 bytes for a prompt of N tokens. To rebuild W': duat explain "
        "operator-file.",
    )
    maps: int | None = options.compute_option(
        metavar="K",
        min=0,
        help="Also give C of the first K prompts, token by token, up to 64 tokens, in the JSON and on the page. "
        "Default: 0, or 1 with --format html.",
    )
    save: str | None = options.compute_option(
        metavar="WHAT",
        help="Write what the input sets in every block, one .safetensors file a prompt, block by block: H (attention "
        "weights), S (norm scales), bias (b'_{j,2} and b'_{j,3}), separated by commas; needs --save-to. More: "
        "duat explain network.",
    )
    save_to: str | None = options.compute_option(
        metavar="DIR", help="The folder of --save: a new one, or one without such files."
    )
    null: Literal["all", "uniform"] = options.compute_option(
        "all",
        metavar="WHICH",
        help="What to compare the statistics of W' with. uniform: uniform attention. all: also the same architecture "
        "re-initialised, which takes a second model's memory, or a second block's where weights are read in parts.",
    )
    out: str | None = options.OUT
    no_cache: bool = options.compute_option(help="Neither read nor write the cache of Gram matrices and nulls.")

    def settings(self) -> InspectOptions:
        """The options, parsed. Raises InputError for impossible --layers and --threshold."""
        from duat_cli.analysis.inspect.options import InspectOptions
        from duat_cli.api.settings import blocks_of, not_negative

        layers = blocks_of(self.layers)
        not_negative("--threshold", self.threshold)
        alike = {field.name for field in dataclasses.fields(InspectOptions)} - {"layers", "cache"}
        given = {name: getattr(self, name) for name in alike}
        return InspectOptions(layers=layers, cache=not self.no_cache, **given)


@grouped
def inspect(
    model: str | None = options.MODEL,
    *,
    texts: options.Texts,
    files: options.Files,
    asked: Asked,
    loading: options.Loading,
    shown: options.Card,
    wide: bool = options.WIDE,
    voice: options.Voice,
) -> int:
    """What each block's attention operator does, exactly, and how the network splits into the paper's terms.

    Exit code: 0 exact, 1 the certificate is not exact, 2 could not tell.
    """
    from duat_cli.analysis.inspect.save.asked import saved_of
    from duat_cli.analysis.plan.task import Task
    from duat_cli.api.target import tensor_target

    alone = asked.matrices is not None or asked.save is not None or (asked.maps or 0) > 1  # as the prompts run
    shared = 1 if asked.out is not None or alone else processes()
    asked_for = frozenset(name for name in get_args(Extra) if getattr(asked, name))
    task = Task("inspect", reinitialised=asked.null == "all", processes=shared, extras=asked_for)
    wanted = loading.request(model, task)
    read = texts.request(files.given())
    talk = talk_of(voice)
    settings = asked.settings()
    presentation = Presentation.of(shown, voice, wide=wide)
    every = files.stack == EVERY
    if every and presentation.form == "model-card":
        raise InputError("--stack all and --format model-card contradict each other: a section is of one stack")
    matrix_file = tensor_target("--matrices", asked.matrices)
    saved = saved_of(asked.save, asked.save_to)

    def into(ranks: Ranks, progress: Progress) -> InspectReport | None:
        from duat_cli.analysis.opening import open_set
        from duat_cli.analysis.shards.inspect import inspect_into

        loaded, prompts = open_set(wanted, read, progress, ranks.local)
        if loaded.paged is None:
            settle()
        return inspect_into(expanded(asked.out or ""), loaded, prompts, settings, texts.max_tokens, ranks, progress)

    if asked.out is not None:
        if matrix_file is not None:
            raise InputError("--out and --matrices contradict each other: matrices are written by one process")
        if asked.maps:
            raise InputError("--out and --maps contradict each other: maps are drawn by one process")
        if saved is not None:
            raise InputError("--out and --save contradict each other: what --save writes is written by one process")
        options.refuse_stack(read.files)
        found = as_rank(model, read, into, talk)
        if found is None:
            return EXIT_SOUND  # the first rank has the report
        reports = [found]
    else:
        if every and (matrix_file is not None or saved is not None):
            name = "--matrices" if matrix_file is not None else "--save"
            raise InputError(f"--stack all and {name} contradict each other: files are of one stack")
        announce(model, talk)
        mapped = int(presentation.form == "html") if asked.maps is None else asked.maps
        reports = _alone(wanted, read, settings, matrix_file, mapped, saved, talk)

    from duat_cli.results.inspect import InspectStacks

    report = InspectStacks(duat_version=reports[0].duat_version, stacks=reports) if every else reports[0]
    presentation.emit(report, talk)
    return EXIT_SOUND if all(one.certificate.exact for one in reports) else EXIT_FINDINGS


def _alone(
    wanted: ModelRequest,
    texts: PromptRequest,
    settings: InspectOptions,
    matrix_file: FileTarget | None,
    mapped: int,
    saved: Saved | None,
    talk: Talk,
) -> list[InspectReport]:
    from duat_cli.analysis.opening import of_stacks
    from duat_cli.api.target import operator_file

    count = 0
    with Progress(talk) as progress:

        def report_of(loaded: LoadedModel, inputs: list[Prompt]) -> InspectReport:
            from duat_cli.analysis.inspect.maps import Maps
            from duat_cli.analysis.inspect.options import Filled
            from duat_cli.analysis.inspect.run import inspect as compute
            from duat_cli.analysis.inspect.save.states import saving
            from duat_cli.loading.model.tokenizer import token_texts

            nonlocal count
            count += len(inputs)
            decode = token_texts(loaded, wanted.trust_remote_code) if mapped or saved or matrix_file else None
            maps = Maps(inputs[:mapped], decode) if mapped and decode else None
            with (
                operator_file(matrix_file, decode) as file,
                contextlib.nullcontext() if not saved or not decode else saving(saved[1], saved[0], decode) as states,
            ):
                return compute(loaded, inputs, settings, progress, Filled(file, maps, states))

        reports = of_stacks(wanted, texts, progress, report_of)
    if matrix_file is not None:
        talk.note(f"wrote {matrix_file.path}")
    if saved is not None:
        from duat_cli.text import plural

        talk.note(f"wrote {plural(count, 'file')} to {saved[1]}")
    return reports
