"""Runs prompts through the model once, and carries the gradients of their targets back once, block by block.

Where all weights are in memory, the prompts go one after the other. Where weights are read block by block, as many
prompts as fit are recorded side by side, and their gradients then go back through each block together: two reads, the
second one backwards. The part of the model behind the last block is examined in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.analysis.attribute.experts import KnownExperts
from duat_cli.analysis.attribute.leading import Leading
from duat_cli.analysis.attribute.parts import BlockParts, PromptParts, block_parts, token_parts
from duat_cli.analysis.attribute.targets import Chooser, Odds, Target, likelihoods, odds_of
from duat_cli.analysis.attribute.total import PromptSums
from duat_cli.analysis.plan.waves import recorded_waves
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session
from duat_cli.compat.libc import give_back_free_memory
from duat_cli.errors import InputError, UnsupportedModelError, needed
from duat_cli.loading.checkpoint.sizes import streams_of
from duat_cli.loading.prompts import Prompt
from duat_cli.models.block.parts import BlockParts as BlockModules
from duat_cli.models.budgets import TARGET_BYTES, target_bytes
from duat_cli.models.discovery.causality import logits_in, over_tokens, run_pair
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS, STATES, Given, placed, probe_inputs, stack_of
from duat_cli.models.discovery.structure import Discovered, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.tracing import Trace
from duat_cli.models.sweep.adjoint import Adjoint
from duat_cli.models.sweep.chain import Chain
from duat_cli.models.sweep.detached import without_gradient
from duat_cli.models.sweep.ending import Ending, EndingForm, find_ending
from duat_cli.models.sweep.lockstep import Guest, Pass
from duat_cli.models.sweep.passes import Behind, Recorded, RecordingPass
from duat_cli.models.terms.sites import BlockSites, Sites, block_sites


@dataclass
class Found:
    """Results for some targets of one prompt."""

    prompt: int
    targets: list[Target]
    parts: PromptParts
    leading: list[Leading]
    capped: list[float | None]  # the targets' values behind the model's cap; None without one
    ranks: list[int | None]
    odds: list[Odds | None]
    dtype: torch.dtype  # of the model's own output


@dataclass
class _Prompt:
    """A prompt on its way through the model."""

    number: int
    ids: Tensor  # (1, N)
    forward: Prediction
    record: RecordingPass | None = None

    def recorded(self) -> Recorded:
        return needed(self.record).recorded


class Work:
    """The passes for all prompts of one model."""

    def __init__(
        self, session: Session, chooser: Chooser, progress: Progress, leading: int, heads: int, count: int
    ) -> None:
        """leading, heads: how many leading neurons and experts, and how many heads' flows, are kept. count: number of
        all prompts, however many are asked about at a time."""
        self._session, self._chooser, self._progress = session, chooser, progress
        self._leading, self._heads, self.count = leading, heads, count
        loaded = session.loaded
        self._model = loaded.headed
        probe = probe_inputs(stack_of(loaded.model), loaded.like, DISCOVERY_TOKENS, loaded.device)
        ids = probe if isinstance(probe, Tensor) else probe["input_ids"]
        self._probe = _Prompt(-1, ids, Prediction(self._model, probe))
        self.known = KnownExperts()
        self.sites: dict[nn.Module, BlockSites] = {}
        self.form: EndingForm | None = None
        self.chain: Chain | None = None
        self.likelihoods: dict[int, list[tuple[float, float]]] = {}  # of given continuations, by prompt
        self.sums: dict[int, PromptSums] = {}  # by prompt; empty for a single prediction
        self._done = 0

    def run(self, prompts: Mapping[int, Prompt]) -> list[Found]:
        """Results for prompts, which come by their numbers, in order."""
        session, model = self._session, self._model
        found = []
        for numbers in [[number] for number in prompts] if session.weights is None else self._waves(prompts):
            device = session.loaded.device
            every = [(k, prompts[k].input_ids, placed(prompts[k].given, device, model.dtype)) for k in numbers]
            wave = [_Prompt(k, ids.to(device), Prediction(model, given)) for k, ids, given in every]
            self._record(wave)
            found += self._back(wave)
        return sorted(found, key=lambda one: one.prompt)

    def _waves(self, prompts: Mapping[int, Prompt]) -> list[list[int]]:
        """Numbers of prompts in waves whose recorded passes fit beside each other."""
        config, size = self._model.config.get_text_config(), self._session.loaded.model.dtype.itemsize
        width = config.hidden_size * streams_of(config)
        numbers, tokens = list(prompts), [prompt.input_ids.shape[1] for prompt in prompts.values()]
        return [[numbers[k] for k in wave] for wave in recorded_waves(tokens, self._session.depth, width, size)]

    def _record(self, wave: list[_Prompt]) -> None:
        """Records prompts; the first wave runs beside discovery, with the probe prompt."""
        if self.form is not None:
            for prompt in wave:
                prompt.record = RecordingPass(self._session.structure, prompt.forward)
            self._session.together([p.record for p in wave if p.record is not None])
            return
        guest = self._session.discover_beside(lambda found: _Guest(found, self._probe, wave))
        self.sites, self.chain = guest.sites, guest.chain
        give_back_free_memory()
        if self._session.structure.seams:
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: adds features of pictures to the stream between blocks, which are "
                "no part here yet; duat inspect carries them, and a prompt without pictures has none"
            )
        self._progress(0, 1, "what stands between the last block and the output")
        self.form = find_ending(self._model, self._behind(self._probe))
        self._probe.record = None

    def _behind(self, prompt: _Prompt) -> Behind:
        return Behind(self._session.structure, prompt.forward, prompt.recorded(), self._session.weights)

    def _back(self, wave: list[_Prompt]) -> list[Found]:
        """Carries the gradients of a wave's targets back through all blocks."""
        under_way = [one for prompt in wave for one in self._begun(prompt)]
        calls = [prompt.recorded().calls for prompt in wave]
        for prompt in wave:
            prompt.record = None  # frees the logits
        structure, weights = self._session.structure, self._session.weights
        blocks = len(structure.calls)
        total = blocks * self.count
        if weights is None:  # progress counts the prompts before this one, whichever process runs them
            self._done = wave[0].number * blocks
        predictions = self.count - len(wave) + sum(len(one.targets) for one in under_way)
        for prompt in wave:
            self.sums[prompt.number] = PromptSums(self._model.dtype)
        for number in reversed(range(blocks)):
            if weights is not None:
                weights.bring(structure.calls[number])
            for one in under_way:
                run, parts = one.through(number, self.known)
                self._session.count_heads(run)
                if predictions > 1:
                    self.sums[one.prompt].add(parts)
            for kept in calls:
                kept.pop()  # frees this block's call
            if weights is not None:
                self.known.forget()  # the forms hold the block's weights
            self._done += len(wave)
            self._progress(self._done, total, f"gradients back through block {number}")
        return [one.finished() for one in under_way]

    def _begun(self, prompt: _Prompt) -> list[_UnderWay]:
        """The targets of a prompt with their gradients at the last block's output, in groups that fit in memory."""
        assert self.form is not None
        structure, recorded = self._session.structure, prompt.recorded()
        ids = prompt.ids[0].tolist()
        if self._chooser.likelihood:
            if self.form.layer is not None:
                raise InputError(
                    "--continuation: this model caps its logits, and parts are of those in front of the cap; --steps "
                    "attributes greedy tokens"
                )
            count = self._chooser.continued[prompt.number]
            self.likelihoods[prompt.number] = likelihoods(recorded.output, ids, count)
        where = f"prompt {prompt.number + 1}" if self.count > 1 else "the prompt"
        labelled = recorded.output.ndim == 3 and not over_tokens(self._model, recorded.output)
        targets = self._chooser.of(
            prompt.number, ids, recorded.output, where, headless=prompt.forward.headless, labelled=labelled
        )
        ending = Ending(self._behind(prompt), self.form)
        own = recorded.output if self.form.layer is None else ending.output  # the model's output before any cap
        ending.output = own  # frees a second tensor as large as all logits
        hidden = torch.zeros_like(ending.hidden).requires_grad_()
        with torch.enable_grad():
            output = ending(hidden, gradient=True)
            values = [target.of(output) for target in targets]
        if not output.requires_grad:
            raise without_gradient("the last block, or what follows it")
        del output
        at = _at_last(values, hidden, targets)
        size = _bytes(recorded, self.sites)
        found = []
        for some in torch.arange(len(targets)).split(max(1, TARGET_BYTES // size)):
            here = [targets[k] for k in some]
            parts = PromptParts(
                output=torch.stack([target.of(own.detach()) for target in here]),
                head=torch.stack([values[k].detach() for k in some]),
            )
            one = Found(
                prompt=prompt.number,
                targets=here,
                parts=parts,
                leading=[Leading(self._leading, self._heads) for _ in here],
                capped=[None if own is recorded.output else float(t.of(recorded.output.detach())) for t in here],
                dtype=own.dtype,
                ranks=[target.rank(recorded.output) for target in here],
                odds=[odds_of(self._model, target, recorded.output) for target in here],
            )
            adjoint = Adjoint(structure, self.sites, recorded.calls, at[some])
            found.append(_UnderWay(one, adjoint, recorded.calls[0].before))
        return found


class _UnderWay:
    """Some targets of one prompt, whose gradients are on their way back."""

    def __init__(self, found: Found, adjoint: Adjoint, first: Tensor) -> None:
        """first: the hidden states in front of the first block, (1, N, M)."""
        self._found, self._adjoint, self._first = found, adjoint, first
        self.prompt, self.targets = found.prompt, found.targets

    def through(self, number: int, known: KnownExperts) -> tuple[BlockRun, BlockParts]:
        """Carries the gradients back through one block; its run, and its parts with all neurons."""
        block = self._adjoint.through(number)
        parts = block_parts(block, known)
        for target, leading in enumerate(self._found.leading):
            leading.add(target, block, parts)
        units = [replace(unit, neurons=None, experts=None) for unit in parts.units]
        self._found.parts.blocks.insert(0, replace(parts, units=units))
        return block.run, parts

    def finished(self) -> Found:
        """The results, once the gradients are back through all blocks."""
        parts, at = self._found.parts, self._adjoint.at
        parts.tokens, parts.tokens_direct = (token_parts(at[reading], self._first) for reading in ("total", "direct"))
        return self._found


class _Guest(Guest):
    """The probe prompt and those of the first wave, recorded beside the discovery of the model."""

    def __init__(self, found: Discovered, probe: _Prompt, wave: Sequence[_Prompt]) -> None:
        self.sites: dict[nn.Module, BlockSites] = {}
        self.chain = Chain(found, probe.forward)
        passes: list[Pass] = [*self.chain.passes]
        for prompt in (probe, *wave):
            prompt.record = RecordingPass(found, prompt.forward)
            passes.append(prompt.record)
        super().__init__(passes)

    def proved(self, parts: BlockModules, written: Trace) -> None:
        self.sites[parts.module] = block_sites(parts, written)


class Prediction:
    """One pass of a model on a prompt and its pictures, up to its prediction; for an encoder-decoder, on the encoder's
    states and the decoder's tokens."""

    def __init__(self, model: Any, given: Given, mask: Tensor | None = None) -> None:
        """mask: as for `run_stack`."""
        self._model, self._given, self._mask = model, given, mask
        self.headless = False  # whether the output is the mean of hidden states; known once it has run

    def __call__(self) -> Tensor:
        """The output, (1, N, vocabulary) or (1, classes), or (1, M) without a head."""
        name = type(self._model).__name__
        if name.endswith("ForMultipleChoice"):
            raise UnsupportedModelError(
                f"{name} chooses between several texts, and a prompt is one text: it has no logit to attribute; duat "
                "inspect and verify read its blocks"
            )
        if isinstance(self._given, Tensor) or STATES not in self._given:
            output = run_stack(self._model, self._given, self._mask)
        else:
            output = run_pair(self._model, self._given)
        found = logits_in(output)
        if found is not None:
            self._require_choice(found)
            return found
        hidden = getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModelError(f"{type(self._model).__name__} puts out neither `logits` nor hidden states")
        self.headless = True
        return hidden.mean(dim=1)

    def _require_choice(self, logits: Tensor) -> None:
        """Raises UnsupportedModelError for one number a token (ELECTRA's discriminator), which is no row of classes."""
        ids = self._given if isinstance(self._given, Tensor) else self._given.get("input_ids")
        labels = getattr(self._model.config, "num_labels", 0)
        if ids is not None and logits.shape == ids.shape and logits.shape[-1] != labels:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} gives one number for each token: no choice among tokens or classes"
            )


def _at_last(values: list[Tensor], hidden: Tensor, targets: Sequence[Target]) -> Tensor:
    """The gradient of every value at the last block's output, (targets, 1, N, M).

    If each target is at a token of its own, one backward pass serves them all: what follows the last block treats every
    token by itself. (If it did not, the sum of the parts would miss the logit.)
    """
    if len(values) == 1 or any(target.position is None for target in targets):
        return torch.stack([torch.autograd.grad(value, hidden, retain_graph=True)[0] for value in values])
    (together,) = torch.autograd.grad(torch.stack(values).sum(), hidden)
    at = together.new_zeros(len(targets), *together.shape)
    for k, target in enumerate(targets):
        at[k, :, target.position] = together[:, target.position]
    return at


def _bytes(recorded: Recorded, sites: Sites) -> int:
    """Bytes of one target's gradients in one block, approximately."""
    call = recorded.calls[0].before
    tokens = call.shape[1]
    neurons = max((site.count for found in sites.values() for site in found.sites if site.kind == "neuron"), default=0)
    return target_bytes(tokens, call.shape[2], neurons)
