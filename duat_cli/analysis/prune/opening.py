"""Opening for `prune-bound`: the model, and its inputs to choose sets, to test them, and to fit a repair to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from duat_cli.analysis.opening import encoded, load_found, noted
from duat_cli.errors import InputError
from duat_cli.loading.importing import uncollected
from duat_cli.text import clean

if TYPE_CHECKING:
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.plan.task import PruneOptions
    from duat_cli.analysis.progress import Progress
    from duat_cli.loading.inputs.request import InputFiles
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompts import Prompt

Sets: TypeAlias = "tuple[list[Prompt], list[Prompt], list[Prompt]]"
"""Prompts to choose sets with, those held out, and those that a repair is fitted to."""


def open_with_calibration(
    model: ModelRequest, texts: PromptRequest, holdout: str | None, calibration: str | None, progress: Progress
) -> tuple[LoadedModel, list[Prompt], list[Prompt], list[Prompt]]:
    """`open_session`, with two more lists: the prompts held out, from a file, as a share of the prompts, or the bundled
    set (None); and the prompts of the file that a repair is fitted to, empty without a file. Pictures and sounds are
    split as by `inputs_apart`."""
    from duat_cli.loading.prompts import read_prompts, share_of

    read, apart, bundled = texts.read_apart(holdout, progress)
    pruning, files = None if model.task is None else model.task.pruning, texts.files
    if pruning is not None and (files is None or texts.own):  # else the model may read no texts
        pruning.require_held_out(len(apart))
    fitted = [] if calibration is None else read_prompts([], calibration, sys.stdin, "--calibration", chat=texts.chat)
    found = model.find(progress)
    if files is not None:
        asked = files.without_blocks
        texts = replace(texts, files=asked)
        progress(0, 0, "loading torch and transformers")
        with uncollected():
            from duat_cli.analysis.prepared import open_prepared
            from duat_cli.analysis.stacks import part_of
        made = open_prepared(model, found, texts, asked, read, progress, share_of(holdout))
        if made is not None:
            sets = inputs_apart(made[1], holdout, pruning, calibration)
            return of_stack(made[0], sets, files, trust_remote_code=model.trust_remote_code)
        if pruning is not None:
            pruning.require_held_out(len(apart))
    loaded, tokenizer = load_found(model, found, texts, read, progress, apart, fitted)
    if files is not None:
        loaded = part_of(loaded, asked.part)
    prompts, notes = encoded(tokenizer, loaded, read, texts.max_tokens, bundled=not texts.own)
    held_out, more = encoded(tokenizer, loaded, apart, texts.max_tokens, bundled=bundled)
    fitting, _ = encoded(tokenizer, loaded, fitted, texts.max_tokens, bundled=False)
    loaded, sets = noted(loaded, [*notes, *more]), (prompts, held_out, fitting)
    if files is None:
        return loaded, *sets
    return of_stack(loaded, sets, files, trust_remote_code=model.trust_remote_code)


def inputs_apart(
    prompts: Sequence[Prompt], holdout: str | None, pruning: PruneOptions | None, calibration: str | None = None
) -> Sets:
    """Pictures or sounds, or texts with pictures, to choose sets with; those held out; and an empty list for a repair.
    Held out is the share of them that `holdout` states, or none. Raises InputError for files, which would hold texts,
    and where too few are held out."""
    from duat_cli.loading.prompts import set_apart, share_of

    share = share_of(holdout)
    if holdout is not None and share is None:
        raise InputError(f"--holdout {clean(holdout)}: a file holds texts; of pictures or sounds give a share, as 0.5")
    if calibration is not None:
        raise InputError(
            "--calibration: a file holds texts; a repair is fitted to the pictures or sounds of the report"
        )
    kept, apart = (list(prompts), []) if share is None else set_apart(prompts, share)
    if pruning is not None:
        pruning.require_held_out(len(apart))
    return kept, apart, []


def of_stack(
    loaded: LoadedModel, sets: Sets, files: InputFiles, *, trust_remote_code: bool = False, tokenizer: Any = None
) -> tuple[LoadedModel, list[Prompt], list[Prompt], list[Prompt]]:
    """The stack of an encoder-decoder that --stack names, and the prompts of each set as it reads them. tokenizer: as
    for `with_chosen_blocks`."""
    from duat_cli.analysis.stacks import with_chosen_blocks

    if not files.names_blocks:
        return loaded, *sets
    loaded, read = with_chosen_blocks(
        loaded, [*sets[0], *sets[1], *sets[2]], files, trust_remote_code=trust_remote_code, tokenizer=tokenizer
    )
    apart = len(sets[0]), len(sets[0]) + len(sets[1])
    return loaded, read[: apart[0]], read[apart[0] : apart[1]], read[apart[1] :]
