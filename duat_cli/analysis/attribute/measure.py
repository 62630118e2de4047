"""Real removal of the leading tokens, heads and neurons, beside their frozen parts.

A frozen part is what something contributes to this output; a measured change is what the output loses without it, once
attention and norms have reacted. A head or neuron is set to zero at every token; a neuron inside an expert at those
tokens that the expert gets. A token is removed in two ways, which answer two questions: attention to it is cut (its own
stream stays), or its embedding is replaced by the mean over the vocabulary (its position may still be attended to).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.analysis.attribute.leading import Place
from duat_cli.analysis.attribute.parts import BlockParts, UnitParts
from duat_cli.analysis.attribute.seen import Seen
from duat_cli.analysis.attribute.targets import Target, has_odds
from duat_cli.analysis.attribute.work import Found, Prediction, Work
from duat_cli.analysis.session import Session
from duat_cli.errors import needed
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.block.parts import BlockParts as BlockModules
from duat_cli.models.block.slots import Arguments, joined, parted
from duat_cli.models.instrument.calls import without_cache
from duat_cli.models.instrument.rig import BlockRun, Rig
from duat_cli.models.sweep.lockstep import Call
from duat_cli.models.sweep.passes import (
    Behind,
    BlockCall,
    BlockPass,
    Original,
    RecordingPass,
    Removal,
    Removals,
    removals,
)
from duat_cli.models.sweep.rows import without_each
from duat_cli.models.terms.sites import TermId
from duat_cli.models.value_path.operator import whole_rows
from duat_cli.results.attribute import Agreement, MeasuredParts, RemovedPart, RemovedToken
from duat_cli.results.base import Skipped, finite
from duat_cli.statistics.divergence import kl
from duat_cli.statistics.ranking import largest, spearman
from duat_cli.text import indices

ROWS = 4096  # rows of the embedding that are summed at a time
UNSOUND = "without it the model's output is not finite"
EMPTY = f"{UNSOUND}: its own place may have nothing left to attend to"
LONELY = "it is all that its place attends to, and attention to nothing is no attention"
UNMASKED = "the model's output does not depend on attention_mask, so that attention to a token cannot be cut"
MIXED = "tokens are mixed without attention in {}, where a mask silences the token's own place too, or nothing"
POOLED = (
    "what stands behind the last block reads attention_mask as well, such as a mean over the tokens that it leaves, so "
    "that a mask takes the token's own stream out, too"
)
OWN_PLACE = "a mask also changes what its own place reads of other tokens, and the output is made of that place"
ITSELF = "a mask leaves that a token attends to itself, and the output is made of its own place"
UNEMBEDDED = "the model does not say which module embeds its tokens (get_input_embeddings)"
FEWEST = 4  # fewest pairs for which a rank correlation is given


@dataclass(frozen=True)
class Change:
    """The effect of a removal on a target."""

    logit: float | None  # how much of the target is lost; None where the model then gives no finite number
    kl: float | None  # KL of the output's distribution there, nats; None without a distribution
    why: str = UNSOUND  # why `logit` is None

    @property
    def why_no_kl(self) -> str:
        return self.why if self.logit is None else "the output is no distribution, or leaves its range"


class Measurer:
    """Removals from the pass of one prompt, measured on one target."""

    def __init__(self, session: Session, work: Work, ids: Tensor, target: Target, count: int) -> None:
        """work: done, on this prompt. count: how many heads, neurons and tokens are taken out."""
        self._session, self._sites, self._layer = session, work.sites, needed(work.form).layer
        self._columns = work.known.columns
        self._model, self._ids, self._target = session.loaded.model, ids, target
        self._count = count

    def of(self, found: Found, texts: Sequence[str]) -> MeasuredParts:
        """The leading parts of the first target in `found`, each removed by itself. texts: of the tokens."""
        parts, leading = found.parts, found.leading[0]
        record = RecordingPass(self._session.structure, Prediction(self._model, self._ids))
        plain, calls = Seen(record, self._layer, of=None), record.calls
        masked = range(max(1, self._ids.shape[1] - 1))
        alone = self._masked(masked)
        self._session.together([plain, alone])
        other = parts.tokens.shape[1] != self._ids.shape[1]
        size, end = parts.tokens[0].abs(), self._target.position
        # Tokens behind the target's position have no part in it in a causal model: their zeros would agree trivially.
        reached = [] if other else [k for k, part in enumerate(size.tolist()) if part or end is None or k <= end]
        no_cut = UNMASKED if torch.equal(alone.output, plain.output) else ""
        no_cut = no_cut or self._mixed or self._pooled(record, masked)
        no_cut = LONELY if reached == [end] else no_cut
        no_embedding = "" if self._embedding is not None else UNEMBEDDED
        heads = sorted(
            (
                (block.number, head)
                for block in parts.blocks
                if self._why_no_heads(block) is None
                for head in range(block.heads.shape[1])
            ),
            key=lambda place: -abs(float(parts.blocks[place[0]].heads[0, place[1]])),
        )[: self._count]
        neurons = leading.places["neurons", "total"][: self._count]
        places = [reached[k] for k in largest(size[reached], self._count)]
        _ = no_embedding or self._mean  # computed now, outside of any pass
        passes = [self._without(TermId("head", block, head), calls) for block, head in heads]
        passes += [self._without_neuron(parts.blocks[one.block].units[one.unit], one, calls) for one in neurons]
        cutting = [] if no_cut else [self._cut(place, calls) for place in places]
        passes += [Seen(one, self._layer, of=self._target) for one, _ in cutting]
        passes += [] if no_embedding else [self._replaced(place) for place in places]
        self._session.together([*passes])
        changes = iter([self._change(plain, one) for one in passes])
        found_heads = []
        for b, h in heads:
            total, direct = float(parts.blocks[b].heads[0, h]), float(parts.blocks[b].heads_direct[0, h])
            found_heads.append(_part(b, None, None, h, total, direct, next(changes)))
        found_neurons = [
            _part(one.block, one.unit, *one.within(parts.blocks), one.total, None, next(changes)) for one in neurons
        ]
        cuts, replaced = (
            [Change(None, None, why) if why else next(changes) for _ in places] for why in (no_cut, no_embedding)
        )
        if not no_cut:
            cuts = [
                Change(None, None, why)
                if known.logit is not None and (why := self._why_not_own(place, inside, record))
                else known
                for place, (_, inside), known in zip(places, cutting, cuts, strict=True)
            ]
        no_token = [("attention to a token", no_cut), ("the embedding of a token", no_embedding)]
        if other:
            no_token = [("tokens", _others(parts.tokens.shape[1], self._ids.shape[1]))]
        tokens = [
            _token(place, texts[place], float(parts.tokens[0, place]), *both)
            for place, *both in zip(places, cuts, replaced, strict=True)
        ]
        return MeasuredParts(
            heads=found_heads,
            neurons=found_neurons,
            tokens=tokens,
            agreement=[
                _agreement("heads, total", [(h.part, h.change) for h in found_heads]),
                _agreement("heads, direct", [(h.direct or 0.0, h.change) for h in found_heads]),
                _agreement("neurons", [(n.part, n.change) for n in found_neurons]),
                _agreement("tokens, attention cut", [(t.part, t.cut) for t in tokens]),
                _agreement("tokens, embedding replaced", [(t.part, t.replaced) for t in tokens]),
            ],
            skipped=[Skipped(what=what, why=why) for what, why in [*self._skipped(parts.blocks), *no_token] if why],
        )

    @property
    def _mixed(self) -> str:
        """Why masking a token does not just cut attention to it; empty where it does.

        Mixers such as Mamba's set a masked token's input to zero, so that its own position gets nothing from them
        either. Mixers that ignore the mask read the token as before.
        """
        structure = self._session.structure
        every = [(number, structure.block(number).parts) for number in range(len(structure.calls))]
        found = [n for n, parts in every if parts.mixer is not None or parts.mixing - set(parts.attention)]
        return MIXED.format(indices("block", found)) if found else ""

    def _pooled(self, record: RecordingPass, masked: Sequence[int]) -> str:
        """Why a mask takes more than attention to a token out of the output of a whole text; empty where it does not.
        masked: the tokens that the mask tried leaves out."""
        if self._target.position is not None:
            return ""
        same = self._ended(record, self._under(masked))
        return "" if relative_error(same, record.output) <= tolerance_for(record.output.dtype) else POOLED

    def _ended(self, record: RecordingPass, forward: Prediction, without: Sequence[int] = ()) -> Tensor:
        """The output of the code of `forward` behind the last block, on the hidden states of `record`, zero at the
        places `without`."""
        behind = Behind(self._session.structure, forward, record.recorded, self._session.weights)
        hidden = behind.hidden.clone()
        hidden[:, list(without)] = 0
        one = behind.on(hidden, gradient=False)
        self._session.together([one])
        return one.output

    def _why_no_heads(self, block: BlockParts) -> str | None:
        """Why the heads of a block are not removed; None where they are, or where there are none."""
        sites, heads = self._sites[self._session.structure.calls[block.number]], block.heads.shape[1]
        if sites.count("head") == heads:
            return None
        return sites.reasons.get("head", f"{sites.count('head')} of its {heads} heads can be told apart in front of O")

    def _skipped(self, blocks: Sequence[BlockParts]) -> list[tuple[str, str]]:
        """The heads and neurons that are not removed, by blocks, with the reasons."""
        found: dict[tuple[str, str], list[int]] = {}
        for block in blocks:
            reasons = {("heads", why) for why in [self._why_no_heads(block)] if why is not None}
            reasons |= {(f"neurons of {unit.name}", unit.why) for unit in block.units if unit.why and not unit.mixes}
            for reason in sorted(reasons):
                found.setdefault(reason, []).append(block.number)
        return [(f"{kind} of {indices('block', numbers)}", why) for (kind, why), numbers in found.items()]

    def _without(self, term: TermId, calls: Sequence[BlockCall]) -> Seen:
        return self._running(removals(self._session.structure, self._sites, [term]), calls)

    def _without_neuron(self, unit: UnitParts, place: Place, calls: Sequence[BlockCall]) -> Seen:
        site = needed(unit.site)
        if unit.in_expert is None:
            return self._without(TermId("neuron", place.block, site.offset + place.number), calls)
        where = divmod(place.number, unit.in_expert)
        beside = functools.partial(self._columns[site.module].without, site.module, *where)
        return self._running({place.block: Removal({}, beside=beside)}, calls)

    def _running(self, gone: Removals, calls: Sequence[BlockCall]) -> Seen:
        structure, forward = self._session.structure, Prediction(self._model, self._ids)
        one = without_each(structure, forward, calls, [gone], self._session.weights)
        return Seen(one, self._layer, of=self._target)

    def _cut(self, place: int, calls: Sequence[BlockCall]) -> tuple[BlockPass, list[Arguments]]:
        """The pass in which no token attends to this one, and a list for the arguments of its first block with
        attention.

        The first block reads what it reads without a mask, by which some models also set a token's vector to zero.
        """
        inside: list[Arguments] = []

        def block(number: int, parts: BlockModules, original: Original, args: Any, kwargs: Any) -> Any:
            if number == 0:
                args, kwargs = parts.hidden.put(args, kwargs, calls[0].before.clone())
            if number == self._attending:
                inside.append(parts.hidden.put(*without_cache(args, kwargs), parts.hidden.get(args, kwargs).clone()))
            return original(*args, **kwargs)

        structure, forward = self._session.structure, self._under([place])
        return BlockPass(structure, forward, block, weights=self._session.weights), inside

    @functools.cached_property
    def _attending(self) -> int | None:
        """The first block with attention."""
        structure = self._session.structure
        return next((n for n in range(len(structure.calls)) if structure.block(n).parts.attention), None)

    def _why_not_own(self, place: int, inside: Sequence[Arguments], record: RecordingPass) -> str:
        """Why a mask without a token is no cut at its own place, where the output is made of that place; empty where it
        is: some models mask the token's row as well, and softmax makes a uniform one of it; XLNet's leave it as it is.

        inside: the arguments of the first block with attention, under that mask.
        """
        structure, weights = self._session.structure, self._session.weights
        if self._attending is None or not self._reads(place, record):
            return ""
        if weights is not None:
            weights.bring(structure.calls[self._attending])
        parts, found = structure.block(self._attending).parts, list[str]()

        def listen(run: BlockRun) -> None:
            for call in run.attention:
                row = whole_rows(call.rows)[:, place]  # (heads, N)
                if row.shape[-1] == len(self._ids[0]) and bool(row[:, place].any() or not row.any()):
                    found.append(OWN_PLACE if torch.equal(row, row[:, :1].expand_as(row)) else ITSELF)

        rig, [(args, kwargs)] = Rig(structure.part, [parts], interface=structure.interface), inside
        with rig.active():
            rig.run(lambda: parts.module(*args, **kwargs), listen)
        return next(iter(found), "")

    def _reads(self, place: int, record: RecordingPass) -> bool:
        """Whether the target is made of the last hidden state at this place."""
        if self._target.position is not None:
            return place == self._target.position
        return not torch.equal(self._ended(record, Prediction(self._model, self._ids), [place]), record.output)

    def _masked(self, places: Sequence[int]) -> Seen:
        return Seen(Call(self._under(places)), self._layer, of=None)

    def _under(self, places: Sequence[int]) -> Prediction:
        """The pass under a mask without these tokens."""
        mask = torch.ones_like(self._ids)
        mask[0, list(places)] = 0
        return Prediction(self._model, self._ids, mask)

    def _replaced(self, place: int) -> Seen:
        def put(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            rows, rest = parted(output)
            rows = rows.clone(memory_format=torch.contiguous_format)
            rows.view(-1, rows.shape[-1])[place] = self._mean.to(rows)  # the batch may stand behind the tokens
            return joined(rows, rest)

        plain = Call(Prediction(self._model, self._ids))
        return Seen(plain, self._layer, (needed(self._embedding), put), of=self._target)

    @functools.cached_property
    def _embedding(self) -> nn.Module | None:
        """The module that embeds tokens; None where the model does not say."""
        try:
            found: nn.Module | None = self._model.get_input_embeddings()
        except (AttributeError, NotImplementedError):  # custom model code need not have it
            return None
        return found

    @functools.cached_property
    def _mean(self) -> Tensor:
        """Of what every token of the vocabulary is embedded as, (M,) float64."""
        embedding, count = needed(self._embedding), self._model.config.get_text_config().vocab_size
        total = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad():
            for first in range(0, count, ROWS):
                rows = torch.arange(first, min(first + ROWS, count), device=self._ids.device)
                total = total.to(rows.device) + parted(embedding(rows[None]))[0][0].double().sum(dim=0)
        return total / count

    def _change(self, plain: Seen, other: Seen) -> Change:
        lost = finite(float(self._target.of(plain.raw)) - other.value)
        if lost is None:
            return Change(None, None)
        row = self._target.row(plain.output)
        if not has_odds(self._model, self._target, len(row)):
            return Change(lost, None)
        return Change(lost, finite(float(kl(row[None], other.row[None])[0])))


def _part(
    block: int, unit: int | None, expert: int | None, index: int, part: float, direct: float | None, change: Change
) -> RemovedPart:
    """Result for a head, or a neuron of a unit, that was removed. part, direct: its frozen parts."""
    values = {"kl": change.kl, "change": change.logit, "direct": direct, "unit": unit, "expert": expert}
    return RemovedPart.explained("", {"kl": change.why_no_kl, **_ABSENT}, block=block, index=index, part=part, **values)


_ABSENT = {
    "change": UNSOUND,
    "direct": "of heads alone",
    "unit": "a head is in no unit",
    "expert": "it is in no expert",
}


def _others(tokens: int, read: int) -> str:
    return f"the blocks have {tokens} tokens for the {read} of the prompt: which of them stands for which is not known"


def _token(position: int, text: str, part: float, cut: Change, replaced: Change) -> RemovedToken:
    values = {"cut": cut.logit, "cut_kl": cut.kl, "replaced": replaced.logit, "replaced_kl": replaced.kl}
    cut = replace(cut, why=EMPTY) if cut.why == UNSOUND and not position else cut
    why = {"cut": cut.why, "replaced": replaced.why, "cut_kl": cut.why_no_kl, "replaced_kl": replaced.why_no_kl}
    return RemovedToken.explained(UNSOUND, why, position=position, text=text, part=part, **values)


def _agreement(what: str, given: Sequence[tuple[float, float | None]]) -> Agreement:
    pairs = [(part, change) for part, change in given if change is not None]
    if len(pairs) < FEWEST:
        return Agreement.absent(f"fewer than {FEWEST} were removed", what=what, count=len(pairs))
    found = finite(float(spearman(*torch.tensor(pairs, dtype=torch.float64).T)))
    return Agreement.explained("all are alike", what=what, count=len(pairs), rank_correlation=found)
