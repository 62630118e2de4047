"""Inputs that base and tuned model both read, made once by the base's processor, and the logits that both give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duat_cli.analysis.opening import PromptRequest, noted
from duat_cli.analysis.prepared import expected_positions
from duat_cli.analysis.session import Session
from duat_cli.analysis.stacks import chosen_stack, given_logits
from duat_cli.errors import InputError, needed
from duat_cli.loading.checkpoint.preflight import CheckpointFiles
from duat_cli.loading.declared.fields import processor
from duat_cli.loading.inputs.request import StackName
from duat_cli.loading.model.load import LoadedModel, skeleton
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.causality import head_logits
from duat_cli.models.discovery.modality import placed
from duat_cli.text import clean, some

SHOWN = 4  # most settings of a processor that a note lists


def with_note(loaded: LoadedModel, texts: PromptRequest) -> LoadedModel:
    """The base, with a note of the settings in which the tuned model's processor differs from the base's."""
    files, tuned = texts.files, texts.template
    if loaded.like is None or tuned is None or files is None or files.option == "--inputs":
        return loaded
    other = processor(tuned)
    both = [(field, value, other[field]) for field, value in processor(loaded.files.path).items() if field in other]
    changes = [f"{field} {before} and {after}" for field, before, after in both if before != after]
    note = f"what makes inputs differs: {some(changes, SHOWN)}; both models read what the base's makes"
    return noted(loaded, [clean(note)] if changes else [])


def require_alike(
    base: CheckpointFiles, tuned: CheckpointFiles, stack: StackName | None, prompts: Sequence[Prompt]
) -> None:
    """Raises InputError where the tuned checkpoint cannot read what the base reads, or makes another number of tokens
    of it, as far as passes without weights tell."""
    shells = [chosen_stack(skeleton(files), stack) for files in (base, tuned)]
    heard = [prompt.source or prompt for prompt in reversed(prompts)]
    made = [(one, one.prepared) for one in heard if one.prepared is not None]
    for prompt, prepared in {tuple(t.shape for t in both[1].values()): both for both in made}.values():
        own, other = (expected_positions(shell, prepared) for shell in shells)
        if own != other:
            how = "cannot read it in these sizes" if other is None else f"makes {other} tokens of it, the base {own}"
            raise InputError(f"{prompt.text}: the tuned checkpoint {how}; both have to read the same")


def logits_of(session: Session, output: Any, prompt: Prompt) -> Tensor:
    """Logits of one prompt, (N, vocabulary), or over classes as `given_logits` or `head_logits` returns them. output:
    the stack's return value for it."""
    loaded = session.loaded
    given = placed(prompt.given, loaded.device, loaded.model.dtype)
    if not isinstance(given, Tensor) and (loaded.pair is not None or "input_ids" not in given):
        return needed(given_logits(loaded, output, given))  # the model's `HeadTest` has passed
    return torch.cat([logits for _, logits in head_logits(loaded.model, session.structure.stack, output, given)])
