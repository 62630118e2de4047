"""Findings grouped by cause: what failed first, and the effects that follow from it.

A cause is a fault of the files, a field of config.json, the tokenizer, or weights that moved. A finding of the forward
pass follows from a cause that lies in front of it in depth; without such a cause it is one itself. A failed finding
never follows from a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from duat_cli.checks.baseline import metric_of
from duat_cli.checks.drift import Deviation
from duat_cli.checks.verdict.moved import Depths, moved_tensors
from duat_cli.results.check import Cause, Outcome
from duat_cli.text import indices, plural, shown, some

Origin = Literal["files", "config", "tokenizer", "weights", "adapter", "forward", "policy"]
_ORDER: tuple[Origin, ...] = ("files", "config", "tokenizer", "weights", "adapter", "forward", "policy")
_STORAGE = (
    "integrity.files", "integrity.dtype", "integrity.stated_dtype", "integrity.mixed_dtypes", "integrity.quantised",
    "integrity.per_layer_config",
)  # fmt: skip
"""Rules about how tensors are stored, or about ignored settings, which change no output."""
_LAST = math.inf
_NAMED = 2  # findings that a sentence gives in full
_FIELDS = 3  # changed fields of config.json, or parts of the tokenizer, that a sentence names


def grouped(
    outcomes: Sequence[Outcome], drift: Iterable[Deviation], tensors: Iterable[str], blocks: Sequence[str] = ()
) -> tuple[list[Outcome], list[Cause]]:
    """The outcomes, each with the cause that it follows from, and the causes, in the order of their origin.

    drift: how far each metric moved. tensors: names of all tensors. blocks: module names of the blocks in the order of
    depth, if the model was run.
    """
    found = _Grouping(outcomes, {d.key: _relative(d) for d in drift}, list(tensors), Depths(blocks))
    causes = found.causes()
    behind = {at: cause.id for cause in causes for at in cause.effects}
    return [o.model_copy(update={"behind": behind.get(at)}) for at, o in enumerate(outcomes)], causes


def origin_of(outcome: Outcome) -> Origin:
    """The origin of a finding, by its rule and, for a metric that vanished or is new, by the kind of the metric."""
    family, _, name = outcome.rule.partition(".")
    if name == "tokenizer" and family in ("integrity", "drift"):
        return "tokenizer"
    if outcome.rule == "drift.config":
        return "config"
    if outcome.rule == "drift.weights" or (family == "drift" and metric_of(outcome.where or "").kind == "tensor"):
        return "weights"
    if family in ("integrity", "adapter"):
        return "files" if family == "integrity" else "adapter"
    return "policy" if family in ("bounds", "pruning", "exactness") else "forward"


def _relative(deviation: Deviation) -> float:
    """How far a metric moved relative to its old value; 0 where one side is missing."""
    old, new = deviation.old, deviation.new
    if isinstance(new, list) or isinstance(old, list):
        return deviation.change
    if old is None or new is None:
        return 0.0
    return abs(new - old) / abs(old) if old else (math.inf if new else 0.0)


@dataclass
class _Draft:
    """A cause that is not complete yet."""

    id: str
    origin: Origin
    findings: list[int]
    depth: float = _LAST
    """Depth of the first block whose weights it moves; inf where it moves none."""
    effects: list[int] = field(default_factory=list)


def _listed(messages: list[str]) -> str:
    """The messages in one, with their common beginning up to the colon given once: 'config.json: head_dim 32 → 64;
    num_attention_heads 6 → 3'."""
    first, colon, _ = messages[0].partition(": ")
    named = [messages[0], *(m.removeprefix(first + colon) for m in messages[1:])]
    return some(named, _FIELDS, "; ", ", and ")


class _Grouping:
    def __init__(
        self, outcomes: Sequence[Outcome], relative: dict[str, float], tensors: list[str], depths: Depths
    ) -> None:
        self.outcomes, self.relative, self.tensors, self.depths = outcomes, relative, tensors, depths
        self.found = [at for at, o in enumerate(outcomes) if o.status in ("failed", "warned")]
        self.drafts: list[_Draft] = []

    def causes(self) -> list[Cause]:
        by_origin = {o: [at for at in self.found if origin_of(self.outcomes[at]) == o] for o in _ORDER}
        for origin in ("files", "config", "tokenizer", "adapter", "policy"):
            self._by_rule(origin, by_origin[origin])
        for draft in self.drafts:  # failed findings first, so that a sentence on one finding is on a failed one
            draft.findings.sort(key=lambda at: self.outcomes[at].status == "warned")
        self._weights(by_origin["weights"])
        self._effects(by_origin["forward"])
        self.drafts.sort(key=lambda d: (self._worst(d) == "warned", _ORDER.index(d.origin), d.id != "forward"))
        return [self._cause(draft) for draft in self.drafts]

    def _by_rule(self, origin: Origin, found: list[int]) -> None:
        for at in found:
            rule = self.outcomes[at].rule
            known = next((d for d in self.drafts if d.id == rule), None)
            if known is None:
                self.drafts.append(_Draft(rule, origin, [at]))
            else:
                known.findings.append(at)

    def _weights(self, found: list[int]) -> None:
        """Adds weights that moved: behind a fault of the files that names the same tensor or block, else as a cause."""
        own = []
        for at in sorted(found, key=self._depth):
            fault = self._first(d for d in self.drafts if d.origin == "files" and self._covers(d, at))
            if fault is not None and self._may_follow(at, fault):
                fault.effects.append(at)
                fault.depth = min(fault.depth, self._depth(at))
            else:
                own.append(at)
        if own:
            self.drafts.append(_Draft("weights", "weights", own, depth=self._depth(own[0])))

    def _covers(self, draft: _Draft, at: int) -> bool:
        """Whether a finding of the cause is about this finding's tensor, or about the whole block that holds it."""
        name, block = self._tensor(at), self.outcomes[at].block
        return any(
            f.where == name or (f.block is not None and f.block == block and name.startswith(f"{f.where}."))
            for f in (self.outcomes[n] for n in draft.findings)
        )

    def _effects(self, found: list[int]) -> None:
        """Adds findings of the forward pass behind the cause that explains them; the first without one is a cause."""
        moved = [at for at in found if self.outcomes[at].rule.startswith("drift.")]
        first = min((self._depth(at) for at in moved), default=_LAST)
        unexplained: dict[str, list[int]] = {}
        for at in sorted(found, key=self._depth):
            cause = self._explaining(at, first)
            if cause is None:
                kind = "forward" if self.outcomes[at].rule.startswith("drift.") else "behaviour"
                unexplained.setdefault(kind, []).append(at)
            else:
                cause.effects.append(at)
        if moved := unexplained.get("forward", []):
            start = self._depth(moved[0])
            own = [at for at in moved if self._depth(at) == start]
            cause = _Draft("forward", "forward", own, start)
            cause.effects = [at for at in moved if at not in own and self._may_follow(at, cause)]
            cause.findings += [at for at in moved if at not in own and at not in cause.effects]
            self.drafts.append(cause)
        for at in unexplained.get("behaviour", []):
            following = next((d for d in self.drafts if d.id == "forward" and self._may_follow(at, d)), None)
            if following is None:
                self._by_rule("forward", [at])
            else:
                following.effects.append(at)

    def _explaining(self, at: int, first: float) -> _Draft | None:
        """The cause that explains a finding, or None. first: depth of the first number that moved. If it moved in front
        of all weights that moved, only a field can be the cause."""
        depth, rule = self._depth(at), self.outcomes[at].rule
        allowed = [d for d in self.drafts if self._may_follow(at, d)]
        if rule == "drift.integrity":
            named = self._first(d for d in allowed if d.id == self.outcomes[at].where)
            if named is not None:
                return named
        moved = [d for d in allowed if d.depth <= depth and d.depth < _LAST]
        moved += [d for d in allowed if d.id == "weights" and d.depth == _LAST == depth]
        nearest = min(moved, key=lambda d: d.depth, default=None)
        answers = not rule.startswith("drift.") or rule == "drift.behaviour"  # others are compared on equal tokens
        fields = ("drift.config", "drift.tokenizer") if answers else ("drift.config",)
        field_ = self._first(d for d in allowed if d.id in fields)
        if field_ is not None and rule != "drift.integrity" and not (nearest and 0 < nearest.depth <= first):
            return field_
        if nearest is not None:
            return nearest
        broken = [d for d in allowed if d.origin in ("files", "tokenizer") and d.id not in _STORAGE and self._feeds(d)]
        if rule in ("drift.vanished", "drift.new") or not rule.startswith("drift."):  # the latter: its predictions
            return self._first(d for d in broken if self._worst(d) == "failed")
        return None

    def _feeds(self, draft: _Draft) -> bool:
        """Whether a cause can change the model's input: in the tokenizer ids and texts can, but not the bos or eos of a
        config, nor a template."""
        texts = (self.outcomes[at].where == "tokenizer.json" for at in draft.findings if self._fails(at))
        return draft.id != "integrity.tokenizer" or any(texts)

    def _fails(self, at: int) -> bool:
        return self.outcomes[at].status == "failed"

    def _may_follow(self, at: int, cause: _Draft) -> bool:
        return self.outcomes[at].status == "warned" or self._worst(cause) == "failed"

    def _first(self, drafts: Iterable[_Draft]) -> _Draft | None:
        return min(drafts, key=lambda d: _ORDER.index(d.origin), default=None)

    def _worst(self, draft: _Draft) -> Literal["failed", "warned"]:
        return "failed" if any(map(self._fails, draft.findings)) else "warned"

    def _tensor(self, at: int) -> str:
        return metric_of(self.outcomes[at].where or "").name

    def _depth(self, at: int) -> float:
        """The depth of a finding: its block; -1 in front of the blocks; inf behind them, and for one of no block."""
        outcome = self.outcomes[at]
        if origin_of(outcome) == "weights":
            return self.depths.of_tensor(self._tensor(at))
        return _LAST if outcome.block is None else outcome.block

    # -- in words ------------------------------------------------------------------------------------------------

    def _cause(self, draft: _Draft) -> Cause:
        own = [self.outcomes[at] for at in draft.findings]
        effects = sorted(draft.effects, key=lambda at: -self._far(at))
        return Cause(
            id=draft.id,
            origin=draft.origin,
            status=self._worst(draft),
            rules=list(dict.fromkeys(o.rule for o in own)),
            block=own[0].block,
            where=own[0].where,
            message=self._message(draft, own),
            findings=draft.findings,
            effects=effects,
            folded=self._folded(effects) if effects else None,
        )

    def _message(self, draft: _Draft, own: list[Outcome]) -> str:
        moved = [metric_of(o.where or "").name for o in own if o.rule == "drift.weights"]
        if len(moved) > 1:
            rest = [o.message for o in own if o.rule != "drift.weights"]
            return "; ".join([moved_tensors(moved, self.tensors, self.depths), *rest[:_NAMED]])
        if draft.id == "forward":
            numbers = [*draft.findings, *draft.effects]
            where = f", first at block {own[0].block}" if own[0].block is not None else ""
            return f"{plural(len(numbers), 'number')} of the forward pass moved{where}{self._most(numbers)}"
        if draft.id in ("drift.config", "drift.tokenizer"):
            return _listed([o.message for o in own])
        more = f", and {len(own) - 1} more" if len(own) > 1 else ""
        return own[0].message + more

    def _folded(self, effects: list[int]) -> str:
        """The text on the effects, such as: 67 numbers of the forward pass moved, most:
        'blocks.3.operator.frobenius_norm' by 12 %."""

        def those(test: Callable[[Outcome], bool]) -> list[int]:
            return [at for at in effects if test(self.outcomes[at])]

        weights = those(lambda o: o.rule == "drift.weights")
        numbers = those(self._is_number)
        rest = [at for at in effects if at not in weights and at not in numbers]
        parts = []
        if weights:
            blocks = sorted({b for at in weights if (b := self.outcomes[at].block) is not None})
            where = f" in {indices('block', blocks)}" if blocks else ""
            parts.append(f"{plural(len(weights), 'tensor')} moved{where}")
        if numbers:
            parts.append(f"{plural(len(numbers), 'number')} of the forward pass moved{self._most(numbers)}")
        if rest:
            answers = [self.outcomes[at] for at in rest if not self.outcomes[at].rule.startswith("drift.")]
            parts += [f"{o.rule}: {o.message}" for o in answers[:_NAMED]]
            others = [at for at in rest if self.outcomes[at] not in answers[:_NAMED]]
            names = list(dict.fromkeys(self.outcomes[at].rule for at in others))
            parts += [f"{plural(len(others), 'finding')} of {', '.join(names)}"] if others else []
        return f"behind it: {'; '.join(parts)}"

    def _is_number(self, outcome: Outcome) -> bool:
        """Whether a finding is a number of the forward pass that moved."""
        drift = outcome.rule.startswith("drift.") and outcome.rule != "drift.integrity"
        return drift and origin_of(outcome) != "weights"

    def _most(self, numbers: list[int]) -> str:
        at = max(numbers, key=self._far)
        far = self._far(at)
        if far == 0:
            return ""
        most = ", most:" if len(numbers) > 1 else ":"
        return f"{most} {shown(self.outcomes[at].where)} by {f'{far:.0%}' if far >= 1 else f'{far:.1%}'}"

    def _far(self, at: int) -> float:
        far = self.relative.get(self.outcomes[at].where or "", 0.0)
        return far if math.isfinite(far) else 0.0
