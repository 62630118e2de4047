"""The network as the paper's UAT sum, carried through the model's own blocks (Eq. 11/12 and 33/34).

Block by block x_i = T_i x_{i-1} + c_i + U_i f_i with every dynamic parameter frozen, so

    x_L = (T_L…T_1) x_0  +  b_L  +  Σ_j (T_L…T_{j+1}) U_j f_j          linear + static bias + UAT terms

The three pieces go through each block as one batch of affine images that share the static piece as their origin:
A(static, b), A(linear + static, b), A(dynamic + static, f). Their sum less twice the first is compared with the model's
own output. Because that sum is not itself one of the images, a block that is not affine cannot pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from duat_cli.models.arrays import relative_error
from duat_cli.models.rig import BlockRun, Replay


@dataclass(frozen=True)
class PartNumbers:
    share: float | None  # ⟨part, x⟩ / ‖x‖²
    norm: float | None  # ‖part‖ / ‖x‖


@dataclass(frozen=True)
class ThreeParts:
    linear: PartNumbers
    static: PartNumbers
    dynamic: PartNumbers


@dataclass(frozen=True)
class BlockTerms:
    """The paper's sum at one block's output and at its FFN's first linear layer."""

    output: ThreeParts
    pre_activation: ThreeParts | None
    pre_activation_reason: str | None
    error: float  # the certificate: largest relative error of the rebuilt output and FFN input


@dataclass
class Carried:
    """The pieces of the residual stream: each (N, M)."""

    linear: Tensor
    static: Tensor
    dynamic: Tensor
    terms: list[Tensor] = field(default_factory=list)  # the UAT terms one by one, if asked for


@dataclass(frozen=True)
class Step:
    """One block's replay with what it was given: the reference for everything measured by differences."""

    items: Tensor  # (3, N, M)
    given: list[Tensor]
    replay: Replay
    terms: BlockTerms


class Decomposition:
    """Carries the pieces of one prompt through the blocks."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self.carried: Carried | None = None

    def advance(self, run: BlockRun) -> Step:
        """Carry the pieces through this block. Memory: a few times one block's activations."""
        if self.carried is None:
            x = run.input[0]
            self.carried = Carried(x, torch.zeros_like(x), torch.zeros_like(x))
        before = self.carried
        items = torch.stack([before.static, before.linear + before.static, before.dynamic + before.static])
        given = _given(run)
        replay = run.replay(items, given)
        assert replay.output is not None
        static, with_linear, with_dynamic = replay.output
        after = Carried(with_linear - static, static, with_dynamic - static)
        if self._one_by_one:
            after.terms = _advance_terms(run, before, static, given)
        self.carried = after
        rebuilt = after.linear + after.static + after.dynamic
        x = run.output[0]
        error = max(relative_error(rebuilt, x), _input_error(run, replay))
        pre, reason = _pre_activation(run, replay)
        return Step(items, given, replay, BlockTerms(_three(after, x), pre, reason, error))


def _given(run: BlockRun) -> list[Tensor]:
    """Per unit call, for the three pieces: the output bias, the output bias, the output itself."""
    given = []
    for unit in run.units:
        bias = run.parts.unit_biases.get(unit.module)
        static = (
            torch.zeros_like(unit.output) if bias is None else bias.to(unit.output).expand_as(unit.output)
        )
        given.append(torch.stack([static, static, unit.output]))
    return given


def _advance_terms(run: BlockRun, before: Carried, static: Tensor, given: list[Tensor]) -> list[Tensor]:
    """Every earlier UAT term through this block, and the term that this block adds."""
    items = torch.stack([*(term + before.static for term in before.terms), before.static])
    biases = [g[:1].expand(len(before.terms), *g.shape[1:]) for g in given]
    replay = run.replay(items, [torch.cat([b, g[2:]]) for b, g in zip(biases, given, strict=True)])
    assert replay.output is not None
    return list(replay.output - static)


def shares(parts: list[Tensor], whole: Tensor) -> list[PartNumbers]:
    """Share and norm of each part of `whole`, all (N, width); sums over a token in its dtype, over tokens in float64."""
    size = _inner(whole, whole)
    if size == 0.0:
        return [PartNumbers(None, None)] * len(parts)
    return [PartNumbers(_inner(p, whole) / size, (_inner(p, p) / size) ** 0.5) for p in parts]


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dim=-1).double().sum())


def _three(parts: Carried, whole: Tensor) -> ThreeParts:
    return ThreeParts(*shares([parts.linear, parts.static, parts.dynamic], whole))


def _input_error(run: BlockRun, replay: Replay) -> float:
    """How far the three pieces are from each FFN unit's real input."""
    errors = [0.0]
    for unit, pieces in zip(run.units, replay.unit_inputs, strict=True):
        real = unit.input.reshape(pieces.shape[1:])
        errors.append(relative_error(pieces[1] + pieces[2] - pieces[0], real))
    return max(errors)


def _pre_activation(run: BlockRun, replay: Replay) -> tuple[ThreeParts | None, str | None]:
    """The three parts of what the first FFN unit's nonlinearity reads: the dynamic bias b'_{j,2}."""
    if not run.units:
        return None, "the block has no FFN"
    unit, pieces = run.units[0], replay.unit_inputs[0]
    static, linear, dynamic = pieces[0], pieces[1] - pieces[0], pieces[2] - pieces[0]
    if not any(unit.module.children()):  # the unit is the activation itself and reads the pre-activation
        return _three(Carried(linear, static, dynamic), unit.input.reshape(static.shape)), None
    first = run.parts.first_linears.get(unit.module)
    if first is None:
        return None, f"{type(unit.module).__name__} has no single linear layer in front of its nonlinearity"
    whole = run.recording.linears[first].reshape(static.shape[0], -1)
    zero = first(torch.zeros_like(static[None, :1]))[0]
    linear, dynamic = first(torch.stack([linear, dynamic])) - zero
    return _three(Carried(linear, whole - linear - dynamic, dynamic), whole), None
