"""The stacks of a model, and what --stack names: the part that reads one kind of input, one of several chains of
blocks, or a stack of an encoder-decoder. A decoder reads tokens of its own and, for each prompt, the states of the
encoder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duat_cli.compat.torch import is_list
from duat_cli.errors import ForwardError, InputError, UnsupportedModelError, needed
from duat_cli.loading.inputs.request import READS, InputFiles, StackName
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.tokenizer import load_tokenizer
from duat_cli.loading.prompts import Prompt, limits, said
from duat_cli.loading.quiet import calling_tokenizer, foreign_errors, hushed
from duat_cli.models.discovery.causality import class_logits, decoder_logits
from duat_cli.models.discovery.chains import ByNameError, named
from duat_cli.models.discovery.exchanged import restored
from duat_cli.models.discovery.modality import STATES, decoder_of, ids_name, input_name, is_pair, placed, stack_of
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.sweep.lockstep import forwards
from duat_cli.text import clean, shown

R = TypeVar("R")
STEPS = 15  # tokens that the model generates after its start token if no text is given


def chosen_stack(model: Any, stack: StackName | None) -> Any:
    """The outermost part of a model that reads only the kind of input that --stack names; the model without --stack."""
    if stack is None:
        return model
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel) and reads(inner) == {stack}:
            return inner
    raise InputError(f"--stack {stack}: {type(model).__name__} has no part that reads {' or '.join(READS[stack])}")


def part_of(loaded: LoadedModel, stack: StackName | None) -> LoadedModel:
    """The model, or the part of it that --stack names, with a note."""
    part = chosen_stack(loaded.model, stack)
    if part is loaded.model:
        return loaded
    note = f"--stack {stack}: the {type(part).__name__} of the {type(loaded.model).__name__} alone"
    return replace(loaded, model=part, whole=loaded.model, stack=stack, warnings=(*loaded.warnings, note))


def parts_of(model: Any) -> list[StackName]:
    """Stacks that --stack can name in a model that is no encoder-decoder."""
    found = [reads(inner) for inner in model.modules() if isinstance(inner, PreTrainedModel)]
    return [stack for stack in READS if {stack} in found]


def stack_options(model: Any) -> str:
    """Names of the stacks that --stack can name in a model that reads several kinds of input, in words: its parts that
    read one kind alone. Empty where there is none."""
    parts = parts_of(model)
    if len(parts) > 1:
        return f"{', '.join(parts)} or all"
    return "".join(parts) if len(reads(model)) > 1 else ""


def stack_read(loaded: LoadedModel) -> str | None:
    """Name of the stack that is read, named by --stack or read without it; None for a model of one stack."""
    model = loaded.model
    if loaded.chain is not None:
        return loaded.chain
    if loaded.stack is not None or is_pair(model):
        return loaded.stack or "encoder"
    if len(reads(model)) < 2:
        return None
    return next((stack for stack, names in READS.items() if input_name(model) in names), None)


def reads(model: Any) -> set[StackName]:
    """Kinds of input that a model's forward pass has arguments for."""
    taken, ids = taken_by(model.forward), ids_name(model)
    own = {"input_ids" if name == ids else name for name in taken}
    return {stack for stack, names in READS.items() if any(name in own for name in names)}


def with_chosen_blocks(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    files: InputFiles,
    *,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
) -> tuple[LoadedModel, list[Prompt]]:
    """The stack of an encoder-decoder that --stack names, or one of several chains of blocks; and the prompts as it
    reads them. tokenizer: of a model in memory; that of a checkpoint is read where needed."""
    model, name = loaded.model, type(loaded.model).__name__
    assert files.stack is not None
    if files.chain is not None or not is_pair(model):
        return with_chain(loaded, files.stack), list(prompts)
    if files.stack == "encoder":
        return replace(loaded, stack="encoder"), list(prompts)
    try:
        part = of_decoder(loaded, model)
    except UnsupportedModelError as fault:
        raise InputError(f"--stack decoder: {fault}") from fault
    if files.decoder_prompt is not None:
        if tokenizer is None:
            tokenizer = load_tokenizer(loaded.files.path, trust_remote_code=trust_remote_code)
        same, how = _of_text(model, tokenizer, files.decoder_prompt)
        ids = [same] * len(prompts)
    else:
        ids, how = _written(loaded, prompts)
    states = encoder_states(loaded, prompts)
    found = [_prompt(*each) for each in zip(prompts, ids, states, strict=True)]
    note = f"--stack decoder: the {type(part.model).__name__} of the {name} alone; it reads {how}"
    return replace(part, like=found[0].prepared, warnings=(*loaded.warnings, note)), found


def of_decoder(loaded: LoadedModel, model: Any) -> LoadedModel:
    """`loaded` with the decoder of this encoder-decoder as its model."""
    return replace(loaded, model=decoder_of(model), stack="decoder", pair=model)


def given_logits(loaded: LoadedModel, output: Any, given: Mapping[str, Tensor]) -> Tensor | None:
    """Logits of a model that reads more than token ids: (N, V) for a decoder, by the head of the model it belongs to,
    or (1 or N, classes) for a classifier; None where neither is predicted. output: the stack's return value."""
    if loaded.pair is not None:
        return decoder_logits(loaded.pair, loaded.model, output, given)
    return class_logits(loaded.model, stack_of(loaded.model), output, given)


def both_stacks(
    loaded: LoadedModel,
    prompts: list[Prompt],
    files: InputFiles,
    report_of: Callable[[LoadedModel, list[Prompt]], R],
    *,
    trust_remote_code: bool,
) -> list[R]:
    """Reports on the encoder and on the decoder of an encoder-decoder, each with what it reads; if the decoder cannot
    be read, only on the encoder, whose notes say why. files: as for `with_chosen_blocks`; its stack is ignored."""
    asked, every = replace(files, stack="decoder"), replace(loaded, every_stack=True)
    try:  # first, because the encoder's notes say whether the decoder is read
        decoder_of(loaded.model)
        decoder = report_of(*with_chosen_blocks(every, prompts, asked, trust_remote_code=trust_remote_code))
    except (UnsupportedModelError, ForwardError) as fault:
        note = f"--stack all: the decoder is not read: {fault}"
        return [report_of(replace(loaded, stack="encoder", warnings=(*loaded.warnings, note)), prompts)]
    return [report_of(replace(every, stack="encoder"), prompts), decoder]


def chains_of(loaded: LoadedModel) -> tuple[str, ...]:
    """Names of the chains of blocks that a model runs in one pass, in call order; empty if there is only one."""
    try:
        discover(loaded.model, loaded.like, factors=False)
    except ByNameError as fault:
        return fault.names
    except UnsupportedModelError:  # raised again where the model is read
        pass
    return ()


def with_chain(loaded: LoadedModel, wanted: str) -> LoadedModel:
    """The model with one of its chains of blocks chosen, and a note. Raises InputError, with the names that there are,
    for another name."""
    model, kind = loaded.model, type(loaded.model).__name__
    if loaded.paged is None:
        names = chains_of(loaded)
    else:  # its weights are not in memory, so that no pass can find the chains
        names = tuple(n for n, m in stack_of(model).named_modules() if n and is_list(m))
    if (found := named(names, wanted)) is not None:
        return _of_chain(loaded, found, wanted)
    known = list(names) or (["encoder", "decoder"] if is_pair(model) else parts_of(model))
    if len(known) > 1 or names:
        raise InputError(f"--stack {clean(wanted)}: {kind} has no one stack of that name; it has {', '.join(known)}")
    pair = wanted in ("encoder", "decoder")
    why = "is no encoder with a decoder" if pair else "has one stack of blocks; leave it out"
    raise InputError(f"--stack {clean(wanted)}: {kind} {why}")


def all_chains(loaded: LoadedModel) -> list[LoadedModel]:
    """The model once for each of its chains that can be read; notes name the others. Raises InputError for a model with
    one chain."""
    names, kind = chains_of(loaded) if loaded.paged is None else (), type(loaded.model).__name__
    if not names:
        way = f"give --stack {stack}" if (stack := stack_options(loaded.model)) else "leave it out"
        raise InputError(f"--stack all: {kind} has no two stacks to read; {way}")
    found, notes = list[str](), list[str]()
    for name in names:
        try:
            discover(loaded.model, loaded.like, chain=name, factors=False)
            found.append(name)
        except UnsupportedModelError as fault:
            notes.append(f"--stack all: {name} is not read: {fault}")
    if not found:
        raise UnsupportedModelError("; ".join(notes))
    return [_of_chain(replace(loaded, warnings=(*loaded.warnings, *notes)), name, name) for name in found]


def _of_chain(loaded: LoadedModel, name: str, wanted: str) -> LoadedModel:
    """The model with a chain chosen. wanted: the name as given with --stack."""
    note = f"--stack {wanted}: the blocks of {name} alone; the whole {type(loaded.model).__name__} runs around them"
    return replace(loaded, chain=name, warnings=(*loaded.warnings, note))


def encoder_states(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[Tensor]:
    """States of the encoder for each prompt, (1, K, width), from the model's own pass."""
    stack, pager = stack_of(loaded.headed), None if loaded.paged is None else loaded.paged.pager
    given = [placed(prompt.given, loaded.device, loaded.model.dtype) for prompt in prompts]
    with torch.no_grad(), foreign_errors(f"the encoder of {type(loaded.headed).__name__} cannot be run", InputError):
        outputs = forwards(pager, [lambda one=one: run_stack(stack, one) for one in given])  # type: ignore[misc]
    return [output[0] for output in outputs]


def _prompt(prompt: Prompt, ids: Tensor, states: Tensor) -> Prompt:
    """The decoder's tokens as a prompt, with a hash of the encoder's prompt and of these tokens."""
    hashed = hashlib.sha256(f"{prompt.sha256} {ids.tolist()}".encode()).hexdigest()
    return Prompt(prompt.text, hashed, ids, prompt.line, prepared={"input_ids": ids, STATES: states}, source=prompt)


def behind_own_encoder(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts that were made for the decoder of another model, with the states of this model's encoder. They are as
    they were where this is no decoder."""
    if loaded.pair is None:
        return list(prompts)
    states = encoder_states(loaded, [needed(prompt.source) for prompt in prompts])
    given = [{**needed(prompt.prepared), STATES: one} for prompt, one in zip(prompts, states, strict=True)]
    return [replace(prompt, prepared=one) for prompt, one in zip(prompts, given, strict=True)]


def _start(model: Any) -> int:
    """The token that every decoder prompt begins with."""
    for config in (getattr(model, "generation_config", None), model.config, model.get_decoder().config):
        for found in _starts(config):
            return found
    raise InputError(
        f"--stack decoder: the config of {type(model).__name__} names no decoder_start_token_id; add it to config.json"
    )


def _starts(config: Any) -> list[int]:
    """The start tokens that a config names for a decoder, the preferred one first."""
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
    return [found for found in named if isinstance(found, int)]


def _of_text(model: Any, tokenizer: Any, text: str) -> tuple[Tensor, str]:
    """Token ids of a text as the decoder reads it in training, shifted right behind the start token, (1, N); and a
    description. The text's last token, in most tokenizers a special one, is only predicted, not read."""
    with calling_tokenizer("--decoder-prompt: the tokenizer fails", InputError):
        labels = torch.tensor([tokenizer(text_target=text)["input_ids"]], dtype=torch.long)
    shift, ids = getattr(model, "prepare_decoder_input_ids_from_labels", None), None
    if shift is not None:
        with contextlib.suppress(Exception):  # T5's method reads a field that its config may lack
            ids = shift(labels=labels)
    if ids is None:  # a class without a method for it
        ids = torch.cat([torch.tensor([[_start(model)]]), labels[:, :-1]], dim=1)
    room = limits(model.get_decoder())
    if room.max_positions is not None and ids.shape[1] > room.max_positions:
        raise InputError(
            f"--decoder-prompt: too long, {ids.shape[1]} tokens, the decoder has {room.max_positions} positions"
        )
    if not bool(((ids >= 0) & (ids < room.vocab_size)).all()):
        raise InputError(f"--decoder-prompt: a token id is out of the vocabulary, vocab_size {room.vocab_size}")
    last, how = int(labels[0, -1]), "the tokens of --decoder-prompt"
    if last not in tokenizer.all_special_ids:
        how += f" but for the last, {shown(said(tokenizer, [last]))}, which stands behind what is read"
    return ids, how


def _written(loaded: LoadedModel, prompts: Sequence[Prompt]) -> tuple[list[Tensor], str]:
    """Token ids that the model generates greedily for each prompt, only the start token if it cannot generate; and a
    description."""
    model = loaded.model
    if loaded.paged is not None or not model.can_generate():
        why = "has no head to write with" if loaded.paged is None else "is read block by block"
        start = torch.tensor([[_start(model)]])
        return [start] * len(prompts), f"its start token alone, for the model {why}: give --decoder-prompt"
    found, start = [], torch.tensor([[_start(model)]])
    for prompt in prompts:
        given = placed(prompt.given, loaded.device, model.dtype)
        named = {"input_ids": given} if isinstance(given, Tensor) else dict(given)
        # transformers sizes the cache by the encoder's depth, which a deeper decoder outgrows
        asked: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": STEPS, "use_cache": False}
        written = getattr(model, "generation_config", None)
        if getattr(written, "forced_eos_token_id", None) is not None:
            asked["forced_eos_token_id"] = None  # BART would put its end token at the limit, however unlikely
        if not _starts(written):
            asked["decoder_start_token_id"] = int(start)
        where = f"{type(model).__name__} cannot write a decoder prompt; give --decoder-prompt"
        with torch.no_grad(), restored(model), hushed(), foreign_errors(where, InputError):
            ids = model.generate(**named, **asked).cpu()
        if int(ids[0, 0]) != int(start):  # Whisper leaves the start token out
            ids = torch.cat([start, ids], dim=1)
        found.append(ids[:, : STEPS + 1])
    return found, f"what the model writes, up to {STEPS} tokens behind its start token"
