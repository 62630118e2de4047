"""The network as the paper's UAT sum, carried through the model's own blocks (Eq. 11/12 and 33/34).

Block by block x_i = T_i x_{i-1} + c_i + U_i f_i with every dynamic parameter frozen, so

    x_L = (T_L…T_1) x_0  +  b_L  +  Σ_j (T_L…T_{j+1}) U_j f_j          linear + static bias + UAT terms

The three pieces go through each block as one batch of affine images that share the static piece as their origin:
A(static, b), A(linear + static, b), A(dynamic + static, f); without biases the origin is zero and two images suffice.
The pieces are the differences of these images; their sum is compared with the model's own output. Because that sum is
not itself one of the images, a block that is not affine cannot pass.

In a decoder the encoder's states e enter every block through its cross-attention, whose output with H held is affine in
them, C_i e + d_i: d_i belongs to the static bias, and Σ_j (T_L…T_{j+1}) U_j C_j e is a fourth piece, the encoder's,
carried like the dynamic one. Features of pictures that are added to the stream between blocks belong to it too. In a
stack that runs among others, the sum begins again wherever these change the stream between its blocks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import reached, token_errors
from duat_cli.models.budgets import SOURCE_ELEMENTS
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.attention import AttentionCall, StoredRows
from duat_cli.models.instrument.functions.positions import positions
from duat_cli.models.instrument.held import attending
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.shares import PartNumbers, shares_each
from duat_cli.models.sweep.adjoint import cross_call, cross_output, static_outputs
from duat_cli.models.value_path.factors import Base, operator_of
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.models.value_path.second import second_operator
from duat_cli.operators.uniform import uniform_rows


@dataclass(frozen=True)
class ThreeParts:
    linear: PartNumbers
    static: PartNumbers
    dynamic: PartNumbers
    encoder: PartNumbers | None  # a fourth part, in a decoder
    largest_token: float | None  # the largest share of the squared norm that one token has; None if that is zero


@dataclass(frozen=True)
class BlockTerms:
    """The paper's sum at one block's output and at its FFN's first linear layer."""

    output: ThreeParts  # parts of the sum up to this block
    own: PartNumbers | None  # this block's own UAT term U f in its output, if asked for
    pre_activation: ThreeParts | None
    pre_activation_reason: str | None
    error: float  # the certificate: largest relative error of the rebuilt output and FFN input, also of one token


@dataclass
class Carried:
    """The pieces of the residual stream, each (N, M)."""

    linear: Tensor
    static: Tensor | None  # None: exactly zero
    dynamic: Tensor
    encoder: Tensor | None = None  # in a decoder
    terms: list[Tensor] = field(default_factory=list)  # the UAT terms one by one, if asked for
    sources: Tensor | None = None  # `linear` by source token, if asked for: item j is T_i…T_1 (e_j ⊗ x_0[j]), (N, N, M)
    uniform: Tensor | None = None  # as `sources`, with every H uniform over the tokens that its rows may see

    @property
    def parts(self) -> list[Tensor]:
        """The pieces that are not exactly zero everywhere."""
        return [p for p in (self.linear, self.dynamic, self.encoder, self.static) if p is not None]

    @property
    def bias(self) -> Tensor:
        """The static piece, written out where it is zero."""
        return torch.zeros_like(self.linear) if self.static is None else self.static

    @property
    def total(self) -> Tensor:
        return functools.reduce(torch.add, self.parts)


@dataclass(frozen=True)
class Step(Base):
    """One block's replay with what was given to it: the reference for everything that is measured by differences.

    The items are (3, N, M): static, linear + static, dynamic + static; or, without biases, (2, N, M): linear, dynamic.
    In a decoder, the encoder's piece comes before the dynamic one. If the block's own term has to be replayed, the
    static piece is a further item at the end, with the units' outputs.
    """

    each: list[BlockTerms]  # one per prompt
    dynamic_bias: Tensor | None  # the dynamic piece at the FFN's first linear layer, (N, width)
    pre_activation: Tensor | None  # what the FFN's nonlinearity reads, (N, width)
    ffn_input: Carried | None = None  # the three pieces of the FFN's input, where there is a pre-activation
    first: nn.Module | None = None  # the FFN's first linear layer; None: the nonlinearity reads the input itself

    @property
    def terms(self) -> BlockTerms:
        """Terms of the prompt, if only one ran."""
        [terms] = self.each
        return terms

    def operator(self, run: BlockRun, block: ProvedBlock) -> AttentionOperator:
        """W' of this block under this input. Raises UnsupportedModelError where there is none."""
        if block.factors is None:
            raise UnsupportedModelError(block.factors_reason or "its factors were not looked for")
        return operator_of(run, block.factors, self)

    def bias(self) -> Tensor | None:
        """b'_{j,2} of Eq. 12/34, (N, width): all that the FFN's nonlinearity reads beside the linear path from x_0.

        Call it while the block's weights are in memory. None where there is no pre-activation.
        """
        if (pieces := self.ffn_input) is None:
            return None
        rest = functools.reduce(torch.add, pieces.parts[1:])
        return rest if self.first is None else self.first(rest[None])[0]


def crossing(run: BlockRun, block: ProvedBlock) -> AttentionOperator | None:
    """W'_c of this block under this input: of cross-attention, or of a mixer beside attention. None where the block has
    neither; raises UnsupportedModelError where it has no factors."""
    if block.parts.cross is None and block.parts.second is None:
        return None
    if block.cross is None:
        raise UnsupportedModelError(block.cross_reason or "its factors were not looked for")
    return second_operator(run, block.cross)


class Decomposition:
    """Carries the pieces of one prompt, or of a batch of prompts, through the blocks."""

    def __init__(self, *, one_by_one: bool = False, own: bool = False, by_source: bool = False) -> None:
        """one_by_one: carry every UAT term by itself; own: measure each block's own term in its output; by_source:
        carry the linear piece of every token of x_0 by itself, and again under uniform attention, 2 N times the
        work."""
        self._one_by_one, self._own, self._by_source = one_by_one, own, by_source
        self.carried: Carried | None = None
        self.began = 0  # the block call at which the sum begins
        self._given_last: Tensor | None = None  # output of the block before, (N, M)

    def advance(self, run: BlockRun) -> Step:
        """Carries the pieces through this block. It takes a few times the memory of one block's activations."""
        x = run.input[0]
        before = self.carried or Carried(x, None, torch.zeros_like(x))
        if self._given_last is not None and not torch.equal(x, self._given_last):
            if run.parts.anew:
                before, self.began = Carried(x, None, torch.zeros_like(x)), run.index
            else:
                added = x - self._given_last
                before = replace(before, encoder=added if before.encoder is None else before.encoder + added)
        self._given_last = run.output[0]
        if run.parts.cross is not None and before.encoder is None:
            before = replace(before, encoder=torch.zeros_like(x))
        bare = run.parts.homogeneous and before.static is None
        apart = self._own and not run.parts.arrives  # whether its own term has to be replayed
        four = before.encoder is not None
        items, given = _items(before, bare, apart), _given(run, bare, four, apart)
        replay = run.replay(items, given)
        after = _pieces(replay.end, bare, four)
        if self._one_by_one:
            after.terms = _advance_terms(run, before, after.static, given)
        if self._by_source:
            after.sources, after.uniform = _advance_sources(run, before.linear, before.sources, before.uniform)
        self.carried = after
        inputs = [_pieces(images, bare, four) for images in replay.unit_inputs]
        whole = [(after, run.output, [x] if x.shape == run.output[0].shape else [])]
        whole += [(at, unit.input, []) for at, unit in zip(inputs, run.units, strict=True)]
        missed = [
            token_errors(at.total, seen.reshape(at.linear.shape), [*stream, *at.parts], run.prompts)
            for at, seen, stream in whole
        ]
        errors = [max(own) for own in zip(*missed, strict=True)]
        if not all(math.isfinite(error) for error in errors):
            dtype = str(x.dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"block {run.index}: its rebuilt output is not finite in {dtype}; run with --dtype float32"
            )
        place = _ffn_place(run)
        pieces, before_nonlinearity, reason = _pre_activation(run, inputs, place)
        outputs = _three(after, run.output[0], run.prompts)
        owns = self._own_shares(run, replay.end, given, bare)
        read_by_ffn: list[ThreeParts] | list[None] = [None] * run.prompts
        if pieces is not None and before_nonlinearity is not None:
            read_by_ffn = _three(pieces, before_nonlinearity, run.prompts)
        terms = [
            BlockTerms(output, own, pre, reason, error)
            for output, own, pre, error in zip(outputs, owns, read_by_ffn, errors, strict=True)
        ]
        dynamic = None if pieces is None else pieces.dynamic
        first = None if place is None else run.parts.first_linears.get(run.units[place].module)
        read = None if pieces is None or place is None else inputs[place]
        return Step(items, given, replay, terms, dynamic, before_nonlinearity, read, first)

    def _own_shares(
        self, run: BlockRun, images: Tensor, given: list[Tensor], bare: bool
    ) -> list[PartNumbers] | list[None]:
        """Share and norm of the block's own term in its output, for each prompt; None if not asked for."""
        if not self._own:
            return [None] * run.prompts
        each = shares_each([_own_term(run, images, given, bare)], run.output[0], run.prompts)
        return [own for found in each for own in found.parts]


def _items(before: Carried, bare: bool, own: bool) -> Tensor:
    """The items to replay. In a network without biases so far, the shared origin is zero and is left out.

    own: whether to add the origin again at the end, for the block's own term.
    """
    moving = [before.linear, *([] if before.encoder is None else [before.encoder]), before.dynamic]
    static = before.bias
    if not bare:
        moving = [static, *(piece + static for piece in moving)]
    return torch.stack([*moving, static] if own else moving)


def _pieces(images: Tensor, bare: bool, four: bool) -> Carried:
    """The pieces, as differences of the images of `_items`. four: whether the encoder's piece is among them."""
    static = None if bare else images[0]
    moved = images[not bare :][: 2 + four]
    linear, *between, dynamic = moved if static is None else moved - static
    return Carried(linear, static, dynamic, between[0] if four else None)


def _given(run: BlockRun, bare: bool, four: bool, own: bool) -> list[Tensor]:
    """Outputs to hand out in the replay, for every unit call and item: the output bias; but the full output for the
    dynamic piece and for the block's own term (`own`).

    For cross-attention: its output for states of zeros; but its full output for the encoder's piece.
    """
    given = []
    for unit, static in zip(run.units, static_outputs(run), strict=True):
        encoder, dynamic = static, unit.output
        if run.parts.is_cross(unit.module):
            encoder, dynamic = cross_output(run, unit, cross_call(run).states), static
        moving = [static, encoder, dynamic] if four else [static, dynamic]
        moving = moving if bare else [static, *moving]
        given.append(torch.stack([*moving, dynamic] if own else moving))
    return given


def _own_term(run: BlockRun, images: Tensor, given: list[Tensor], bare: bool) -> Tensor:
    """U f, (N, M): contribution of the units' outputs, without their biases, to the block's output."""
    if not run.parts.arrives:
        return images[-1] if bare else images[-1] - images[0]
    moved = [(g[-1] if bare else g[-1] - g[0]).reshape(images[0].shape) for g in given]
    return moved[0] if len(moved) == 1 else torch.stack(moved).sum(dim=0)


def _advance_terms(run: BlockRun, before: Carried, static: Tensor | None, given: list[Tensor]) -> list[Tensor]:
    """Every earlier UAT term carried through this block, followed by the term that this block adds."""
    origin = before.bias
    items = torch.stack([*(term + origin for term in before.terms), origin])
    biases = [g[:1].expand(len(before.terms), *g.shape[1:]) for g in given]
    replay = run.replay(items, [torch.cat([b, g[-1:]]) for b, g in zip(biases, given, strict=True)])
    return list(replay.end if static is None else replay.end - static)


def _three(parts: Carried, whole: Tensor, prompts: int) -> list[ThreeParts]:
    """The numbers of the parts, for each prompt."""
    found = []
    for numbers in shares_each(parts.parts, whole, prompts):
        linear, dynamic, *rest = numbers.parts
        encoder = rest.pop(0) if parts.encoder is not None else None
        # a static part that is exactly zero has share and norm zero, unless there is nothing to share
        none = PartNumbers(*[None if linear.share is None else 0.0] * 3)
        found.append(ThreeParts(linear, rest[0] if rest else none, dynamic, encoder, numbers.largest_token))
    return found


def _ffn_place(run: BlockRun) -> int | None:
    """Number of the unit call that is the FFN, None without one. Units behind attention and token mixers are preferred,
    and units with layers to a bare σ."""
    parts = run.parts
    mixers = [k for k, u in enumerate(run.units) if u.module in parts.mixing or parts.is_cross(u.module)]
    places = range(max(mixers, default=-1) + 1, len(run.units))
    behind = [k for k in places if run.units[k].behind_attention] or list(places)
    layered = [k for k in behind if not _is_activation(run.units[k].module)]
    return next(iter(layered or behind), None)


def _is_activation(module: nn.Module) -> bool:
    return not any(module.children()) and not any(True for _ in module.parameters())


def _pre_activation(
    run: BlockRun, inputs: list[Carried], place: int | None
) -> tuple[Carried | None, Tensor | None, str | None]:
    """The three pieces and the whole of what the FFN's nonlinearity reads, or the reason why they are not known.

    The dynamic piece is what UAT terms add to b'_{j,2} of Eq. 12/34; the rest of it, W' b'_{j-1,3} + b, is static.
    """
    if place is None:
        return None, None, "no nonlinear FFN was found in the block (an FFN of zeros is none)"
    unit, pieces = run.units[place], inputs[place]
    if _is_activation(unit.module):  # it reads the pre-activation itself
        return pieces, unit.input.reshape(pieces.linear.shape), None
    first = run.parts.first_linears.get(unit.module)
    if first is None:
        return None, None, f"{type(unit.module).__name__}: no single linear layer is seen in front of its nonlinearity"
    whole = run.recording.linears[first].reshape(len(pieces.linear), -1)
    bias = _bias_of(first, pieces.linear)
    moving = [pieces.linear, *([] if pieces.encoder is None else [pieces.encoder])]
    none = pieces.static is None and bias is None  # nothing static, so that the dynamic piece is the rest
    moving = moving if none else [*moving, pieces.dynamic]
    images = first(moving[0][None] if len(moving) == 1 else torch.stack(moving))
    images = images if bias is None else images - bias
    linear, encoder = images[0], None if pieces.encoder is None else images[1]
    rest = whole - linear if encoder is None else whole - linear - encoder
    if none:
        return Carried(linear, None, rest, encoder), whole, None
    return Carried(linear, rest - images[-1], images[-1], encoder), whole, None


def _bias_of(linear: nn.Module, like: Tensor) -> Tensor | None:
    """The layer's output for zero, (1, width), whatever its class does; None where that is zero."""
    if type(linear) is nn.Linear:  # no need to multiply zeros by the weight
        bias = None if linear.bias is None else linear.bias[None]
    else:
        bias = linear(torch.zeros_like(like[None, :1]))[0]
    return bias if bias is not None and bool(bias.any()) else None


# -- the linear piece by source token ---------------------------------------------------------------------------


def _advance_sources(
    run: BlockRun, linear: Tensor, sources: Tensor | None, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Carries both pieces through this block, (N, N, M) each; item j is the image of token j of x_0. linear: x_0, where
    the pieces are None yet.

    uniform: as `sources`, but with every H of every block uniform over the tokens that its rows may see; weights and
    scales of norms are unchanged.
    """
    if run.output.shape != run.input.shape:
        before, after = (t.shape[1] for t in (run.input, run.output))
        raise UnsupportedModelError(
            f"block {run.index} makes {after} tokens of {before}; --end-to-end relates every token of the output to "
            "that of the input"
        )
    if sources is None or uniform is None:
        tokens = len(linear)
        sources = uniform = torch.eye(tokens, dtype=linear.dtype, device=linear.device)[..., None] * linear
    own = _linear_images(run, sources)
    with attending(run, [_uniform(run, call) for call in run.attention]):
        return own, _linear_images(run, uniform)


def _linear_images(run: BlockRun, items: Tensor) -> Tensor:
    """T z for every item z, without the constants of the block; some items at once."""
    base = run.replay(torch.zeros_like(run.input)).end
    pieces = items.split(max(1, SOURCE_ELEMENTS // items[0].numel()))
    return torch.cat([run.replay(some).end - base for some in pieces])


def _uniform(run: BlockRun, call: AttentionCall) -> StoredRows:
    """H with every row 1 / n over the n tokens that the mask leaves visible, or without a mask, that some head
    reaches."""
    seen = positions(run, call)
    if seen is None or call.rows.tokens != seen.shape[-1]:
        seen = reached(call.rows.chunks())
    return StoredRows(uniform_rows(seen, call.rows.heads, call.value.dtype))
