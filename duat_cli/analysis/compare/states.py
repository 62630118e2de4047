"""Results of one block under one prompt, kept until the prompt that it is compared with reaches the same block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duat_cli.analysis.decomposition import Carried, Step, crossing
from duat_cli.analysis.geometry import Geometry
from duat_cli.analysis.inspect.measured.numbers import visible
from duat_cli.analysis.session import Session
from duat_cli.compat.transformers import largest_stated
from duat_cli.errors import InputError, UnsupportedModelError, needed, or_reason
from duat_cli.loading.checkpoint.sizes import streams_of
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import wide
from duat_cli.models.discovery.modality import STATES
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.instrument.routers import Routed as RouterCall
from duat_cli.models.value_path.operator import AttentionOperator, one_stream, whole_rows
from duat_cli.models.value_path.streams import DIFFERS
from duat_cli.operators.input_change import Routed
from duat_cli.operators.kronecker import gram as gram_of

KEPT_BYTES = 4 << 30  # most that is kept of one prompt
VECTORS = 16  # about so many (N, M) are kept of a block: input, output, biases, the FFN's hidden layer


@dataclass(frozen=True)
class OperatorState:
    """W' of one block under one prompt, by its factors."""

    routed: Routed  # Ĥ
    seen: Tensor  # positions that a row may see, (N, N) or, of cross-attention, (N, K), bool
    gram: Tensor  # G, (heads, heads); over channels where attention is gated

    @property
    def uniform(self) -> Routed:
        """Ĥ with the same scales and uniform attention."""
        return self.routed.uniform(self.seen)


@dataclass(frozen=True)
class BlockState:
    """Results of one block under one prompt; every (N, ...) has one row for each token."""

    index: int
    input: Tensor  # (N, M)
    output: Tensor  # (N, M)
    operator: OperatorState | str  # or why there is none
    cross: OperatorState | str | None  # of W'_c, which reads the encoder's tokens; None without cross-attention
    terms: dict[str, Tensor]  # module -> f of that FFN, (N, width)
    bias: Tensor | str  # b'_{j,2}, (N, width), or why it is not known
    carried_bias: Tensor | None  # b'_{j,3}: the static part of the output, (N, M); None without biases
    scales: Tensor | None  # scales of the block's norms, (N, norms)
    gates: Tensor | None  # output gates of its attention, (N, width)
    error: float  # error of the certificate
    routers: Tensor | None  # weights of all experts, (N, experts)


def state_of(
    session: Session, run: BlockRun, step: Step, carried: Carried, tokens: int, experts: Sequence[RouterCall] = ()
) -> BlockState:
    """State of a block that has just run; call it while the block's weights are in memory. experts: its router calls.

    Raises UnsupportedModelError where the block's vectors are not the prompt's tokens.
    """
    if run.input.shape[1] != tokens:
        raise UnsupportedModelError(
            f"block {run.index} ({run.parts.name}) works on {run.input.shape[1]} vectors, the prompt has {tokens} "
            "tokens: they cannot be laid beside those of another prompt"
        )
    bias = step.bias()
    why_no_bias = step.terms.pre_activation_reason or "its FFN's input has no row a token"
    return BlockState(
        index=run.index,
        input=run.input[0].clone(),
        output=run.output[0].clone(),
        operator=or_reason(lambda: _state(session.operator(run, step), lambda: session.geometry(run.index))),
        cross=or_reason(lambda: _cross(session, run)),
        terms=_terms(run, tokens),
        bias=why_no_bias if bias is None else bias.reshape(tokens, -1).clone(),
        carried_bias=None if carried.static is None else carried.static.clone(),
        scales=_scales(run, tokens),
        gates=_gates(run, tokens),
        error=step.terms.error,
        routers=_routers(experts, tokens),
    )


def _cross(session: Session, run: BlockRun) -> OperatorState | None:
    if run.parts.cross is None:
        return None
    operator = needed(crossing(run, session.structure.block(run.index)))
    return _state(operator, lambda: session.geometry(run.index, cross=True))


def _state(operator: AttentionOperator, geometry: Callable[[], Geometry]) -> OperatorState:
    channels = one_stream(operator, DIFFERS).by_channel()
    routed = _routed(operator, channels.source_scale)
    seen = visible((routed.attention != 0).any(dim=0), operator.allowed)
    gram = geometry().gram if operator.gate is None else gram_of(channels.factors)
    return OperatorState(routed, seen, gram)


def _routed(operator: AttentionOperator, sources: Tensor) -> Routed:
    """Ĥ by its factors. A gate is a scale by token, of every head or of every channel; channels then take the place of
    heads.

    sources: source scales of the channels, (heads d, N), or of heads where there is no gate of channels.
    """
    if operator.head_gate is not None and operator.ungated is not None:
        token = operator.head_gate * operator.token_scale  # (heads, N)
        return Routed(whole_rows(operator.ungated), sources, token, operator.offsets)
    attention = whole_rows(operator.rows)
    if operator.gate is None:
        return Routed(attention, sources, operator.token_scale, operator.offsets)
    width = operator.gate.shape[-1]
    token = operator.gate.transpose(1, 2).flatten(0, 1) * operator.token_scale  # (heads d, N)
    return Routed(attention.repeat_interleave(width, 0), sources, token, operator.offsets, channels=True)


def _terms(run: BlockRun, tokens: int) -> dict[str, Tensor]:
    """f of every FFN call: its output without the bias of its last layer, which is in the static part of the sum."""
    names = {module: name for name, module in run.parts.module.named_modules()}
    found: dict[str, Tensor] = {}
    for unit in run.units:
        mixes = unit.module in run.parts.mixing or run.parts.is_cross(unit.module)
        if mixes or unit.output.numel() % tokens:
            continue
        bias = run.parts.unit_biases.get(unit.module)
        term = unit.output if bias is None else unit.output - bias.to(unit.output)
        name = names.get(unit.module, type(unit.module).__name__)
        calls = sum(known.partition(" call ")[0] == name for known in found)
        found[name if not calls else f"{name} call {calls + 1}"] = term.reshape(tokens, -1).clone()
    return found


def _scales(run: BlockRun, tokens: int) -> Tensor | None:
    """Scales of the norms that have one for each token; norms on single heads are part of H."""
    every = [one for many in run.recording.norms.values() for one in many]
    found = [one.scale.reshape(tokens, -1) for one in every if one.scale.numel() == tokens * one.form.groups]
    return torch.cat(found, dim=1) if found else None


def _routers(calls: Sequence[RouterCall], tokens: int) -> Tensor | None:
    dense = [wide(call.dense()) for call in calls if len(call.weights) == tokens]
    return torch.cat(dense, dim=1) if dense else None


def _gates(run: BlockRun, tokens: int) -> Tensor | None:
    held = [gate for many in run.recording.gates.values() for gate in many if gate.numel() % tokens == 0]
    return torch.cat([wide(gate).reshape(tokens, -1) for gate in held], dim=1) if held else None


def block_bytes(session: Session, tokens: int, vectors: int, sources: int = 0) -> int:
    """Bytes of one block under one prompt: its attention matrices, and for each token `vectors` of the hidden size.
    sources: how many tokens of an encoder are read beside its own."""
    config = session.loaded.model.config
    heads, width = (largest_stated(config, name) or 1 for name in ("num_attention_heads", "hidden_size"))
    return 4 * tokens * (heads * (tokens + sources) + vectors * width * streams_of(config))


def require_room(session: Session, prompt: Prompt, blocks: int) -> None:
    """Raises InputError where what is kept of one prompt would not fit.

    blocks: how many are kept at once: all where prompts run one after another, else one.
    """
    tokens = prompt.input_ids.shape[1]
    sources = 0 if prompt.source is None else needed(prompt.prepared)[STATES].shape[1]
    size = blocks * block_bytes(session, tokens, VECTORS, sources)
    if size > KEPT_BYTES:
        raise InputError(
            f"a prompt of {tokens} tokens: what its blocks did takes {size >> 20} MiB beside that of the other prompt, "
            f"more than {KEPT_BYTES >> 20}; use --max-tokens to cut it, or --memory to go block by block"
        )
