"""Commands with `--out`: one process of several, which share the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from duat_cli.errors import DuatError, InputError

if TYPE_CHECKING:
    from duat_cli.analysis.opening import ModelRequest, PromptRequest
    from duat_cli.analysis.progress import Progress
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.cli.terminal.talk import Talk
    from duat_cli.loading.model.load import LoadedModel
    from duat_cli.loading.prompt_set import PromptSet

OBJECTS = 20_000  # made between two looks for garbage: those of a batch are gone by then
R = TypeVar("R")


def into_folder(
    wanted: ModelRequest,
    texts: PromptRequest,
    compute: Callable[[LoadedModel, PromptSet, Ranks, Progress], R | None],
    talk: Talk,
) -> R | None:
    """The report, in the first of all processes; None in the others. compute: a command's results into its folder."""

    def opened(ranks: Ranks, progress: Progress) -> R | None:
        from duat_cli.analysis.opening import open_set

        loaded, inputs = open_set(wanted, texts, progress, gpu=ranks.local)
        return compute(loaded, inputs, ranks, progress)

    return as_rank(wanted.model, texts, opened, talk)


def settle() -> None:
    """For a process that is about to run many prompts over weights in memory: what is there now stays, and every batch
    makes objects and tensors of the same sizes again. Looking for garbage took a tenth of the time on a small model."""
    import gc

    from duat_cli.compat.libc import keep_freed_memory

    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(OBJECTS)


def as_rank(
    model: str | None, texts: PromptRequest, compute: Callable[[Ranks, Progress], R | None], talk: Talk
) -> R | None:
    """What this process of several has to say; errors of all but the first name their rank."""
    from duat_cli.analysis.shards.ranks import Ranks
    from duat_cli.cli.shared.announce import announce
    from duat_cli.cli.terminal.progress import Progress

    ranks = Ranks.of()
    if ranks.world > 1 and "-" in (texts.file, *(texts.prompts or ())):
        raise InputError("standard input is read by one process; give --prompts a file that all can read")
    talk = talk if ranks.first else replace(talk, quiet=True, verbose=False)
    announce(model, talk)
    try:
        with Progress(talk) as progress:
            return compute(ranks, progress)
    except DuatError as error:
        if ranks.first:
            raise
        raise type(error)(f"{ranks}: {error}") from error
