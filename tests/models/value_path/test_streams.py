"""W' where a token has several streams, against the matrix that the model's own frozen block applies."""

from __future__ import annotations

import functools

import pytest
import torch
from attributing import as_double
from helpers import token_ids
from torch import Tensor

from duat_cli.analysis.decomposition import Decomposition
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.discovery.structure import discover, run_stack
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.factors import Tap, checked
from duat_cli.models.value_path.operator import AttentionOperator, one_stream
from duat_cli.models.value_path.streams import DIFFERS, reaching_weights, spread, weighed
from duat_cli.zoo import tiny

TOKENS = 3
FLOAT32 = 1e-5  # the models' own code makes the weights of streams, and the norms behind attention, in float32
CASES = {  # model type -> a block of it
    "hy_v4": 1,  # streams on an axis of their own, gated attention; shared choice of keys
    "glm5_next_text": 1,  # the same with weights that mix the streams that are handed on
    "gemma3n_text": 0,  # streams in front of the batch; one is read, and reached through a norm
}


@functools.cache
def case(model_type: str) -> tuple[AttentionOperator, Tensor, int]:
    """W' of one block, the dense matrix of all streams, (N·rows, N·S·M), and the number of streams S."""
    model = as_double(tiny.tiny_model(model_type))
    structure = discover(model)
    found: list[tuple[AttentionOperator, Tensor, int]] = []
    decomposition = Decomposition()

    def listen(run: BlockRun) -> None:
        step, block = decomposition.advance(run), structure.block(run.index)
        if run.index == CASES[model_type]:
            assert block.factors is not None
            operator = checked(step.operator(run, block), run, block.factors.tap)
            found.append((operator, dense(run, block.factors.tap).double(), run.parts.streams))

    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, token_ids(model, tokens=TOKENS)), listen)
    return found[0]


def dense(run: BlockRun, tap: Tap) -> Tensor:
    """What attention adds where it meets the stream, for each unit vector in place of the block's input, by the block's
    own code: H, norms and the weights of streams are held."""
    zero = torch.zeros_like(run.input)
    columns = []
    silent = tap.read(run.replay(zero, attention=run.replay(zero).mixed[0]))
    for entry in range(zero.numel()):
        unit = zero.clone()
        unit.view(-1)[entry] = 1.0
        columns.append((tap.read(run.replay(zero, attention=run.replay(unit).mixed[0])) - silent).flatten())
    return torch.stack(columns, dim=1)


def of_all_streams(operator: AttentionOperator, streams: int) -> Tensor:
    """U W' Wᵀ by images of unit vectors, dense."""
    one = operator.matrix().dense()
    width = one.shape[1] // TOKENS
    assert operator.read is not None
    assert operator.read.shape == (TOKENS, streams)
    assert torch.allclose(operator.read.norm(dim=1), torch.ones(TOKENS, dtype=torch.float64))
    unit = torch.eye(TOKENS * streams * width, dtype=one.dtype).reshape(-1, TOKENS, streams * width)
    read = torch.stack([weighed(x, operator.read).flatten() for x in unit])
    made = (read @ one.T).reshape(len(unit), TOKENS, -1)
    return torch.stack([spread(y, operator.reached).flatten() for y in made], dim=1)


@pytest.mark.parametrize("model_type", CASES)
def test_w_of_all_streams_is_that_of_their_unit_weights_between_isometries(model_type: str) -> None:
    operator, whole, streams = case(model_type)
    assert streams == 4
    assert (of_all_streams(operator, streams) - whole).norm() <= FLOAT32 * whole.norm()
    one = operator.matrix().dense()
    assert float(one.norm()) == pytest.approx(float(whole.norm()), rel=FLOAT32)
    values = [torch.linalg.svdvals(matrix)[:20] for matrix in (one, whole)]
    assert torch.allclose(*values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", CASES)
def test_norms_by_pair_of_tokens_are_those_of_all_streams(model_type: str) -> None:
    operator, whole, _ = case(model_type)
    one = operator.matrix().dense()
    pairs = [
        torch.linalg.matrix_norm(m.reshape(TOKENS, len(m) // TOKENS, TOKENS, -1).transpose(1, 2)) for m in (one, whole)
    ]
    assert torch.allclose(*pairs, rtol=1e-5, atol=1e-6)
    assert not bool(pairs[0].triu(1).any())


def test_an_operator_of_several_streams_is_named_where_one_is_needed() -> None:
    operator, _, _ = case("hy_v4")
    with pytest.raises(UnsupportedModelError, match="a token has several streams"):
        one_stream(operator, DIFFERS)


def test_what_arrives_is_fitted_stream_by_stream() -> None:
    torch.manual_seed(0)
    direction, weights = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    scale, reached, [error] = reaching_weights(direction, spread(direction, weights), 1)
    assert reached is not None
    assert error < 1e-12
    assert torch.allclose(scale[:, None] * reached, weights)
    assert torch.allclose(weighed(spread(direction, reached), reached), direction)
    scale, reached, [error] = reaching_weights(direction, 2 * direction, 1)
    assert reached is None
    assert torch.allclose(scale, torch.full((4,), 2.0, dtype=torch.float64))
