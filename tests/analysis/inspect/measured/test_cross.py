"""The statistics of W'_c against the written-out matrix."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from decoders import OWN, given_to, through
from helpers import as_loaded, prompt_of, two_single
from torch import Tensor

from duat_cli.analysis import geometry as geometry_module
from duat_cli.analysis.geometry import Geometry, bare
from duat_cli.analysis.inspect.measured import cross as cross_module
from duat_cli.analysis.inspect.measured.cross import cross_of, measure_cross
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.models.discovery.modality import decoder_of
from duat_cli.models.discovery.proof import ProvedBlock
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.second import second_operator
from duat_cli.operators.kronecker import HeadFactors, gram
from duat_cli.results.operator import CrossOperator


def measured(model_type: str) -> list[tuple[CrossOperator, Tensor, Tensor]]:
    """By block: the numbers, the blocks B_ik (N, K, M, width), and the encoder's states."""
    found = []

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert block.cross is not None
        assert run.recording.cross is not None
        operator = second_operator(run, block.cross)
        blocks = torch.einsum("hnk,hwm->nkmw", operator.matrix().left, operator.factors.maps())
        found.append((measure_cross(operator, lambda: bare(operator.factors)), blocks, run.recording.cross.states[0]))

    through(two_single(model_type).double(), listen)
    return found


def spread(squares: Tensor) -> tuple[float, float]:
    """Mean entropy in bits and mean of 2^entropy, row by row."""
    entropies = [-sum(p * math.log2(p) for p in (row / row.sum()).tolist() if p > 0) for row in squares]
    return sum(entropies) / len(entropies), sum(2**e for e in entropies) / len(entropies)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_the_numbers_are_those_of_the_dense_matrix(model_type: str) -> None:
    for numbers, blocks, states in measured(model_type):
        tokens, sources, width, read = blocks.shape
        assert (numbers.rows, numbers.columns) == (tokens * width, sources * read)
        assert numbers.frobenius_norm == pytest.approx(float(blocks.norm()), rel=1e-9)
        assert numbers.structural_density == 1.0
        stats = numbers.stats
        assert stats is not None
        squares = blocks.square().sum(dim=(2, 3))
        assert (stats.entropy_bits, stats.effective_context) == pytest.approx(spread(squares), rel=1e-9)
        weighted = torch.einsum("nkmw,kw->nkm", blocks, states).square().sum(dim=2)
        both = (stats.weighted_entropy_bits, stats.weighted_effective_context)
        assert both == pytest.approx(spread(weighted), rel=1e-9)
        singular = torch.linalg.svdvals(blocks.flatten(2).flatten(0, 1))  # the rearranged matrix: blocks as rows
        p = singular.square() / singular.square().sum()
        heads = math.exp(-sum(q * math.log(q) for q in p.tolist() if q > 0))
        assert stats.effective_heads == pytest.approx(heads, rel=1e-6)
        flat = [one.flatten() / one.norm() for row in blocks for one in row]
        pairs = [float(a @ b) ** 2 for a, b in itertools.product(flat, flat)]
        assert stats.block_correlation == pytest.approx((sum(pairs) / len(pairs)) ** 0.5, rel=1e-6)


def test_its_null_reads_every_encoder_token_alike() -> None:
    for numbers, blocks, _ in measured("t5"):
        null = numbers.uniform
        assert null is not None
        assert null.effective_context == pytest.approx(blocks.shape[1])  # V and O are the same for every token
        assert null.effective_heads == pytest.approx(1.0)
        assert null.block_correlation == pytest.approx(1.0)


def test_a_block_without_cross_attention_has_none() -> None:
    def unasked() -> Geometry:
        raise AssertionError("there are no factors to know it of")

    def listen(run: BlockRun, block: ProvedBlock) -> None:
        assert cross_of(run, replace(block, parts=replace(block.parts, cross=None)), unasked) is None
        told = cross_of(run, replace(block, cross=None, cross_reason="why not"), unasked)
        assert told is not None
        assert told.stats is None
        assert told.reasons["stats"] == "why not"
        assert told.rows == run.input.numel()

    through(two_single("bart"), listen)


def test_the_gram_matrix_is_computed_once_for_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = two_single("bart"), list[HeadFactors]()

    def counted(factors: HeadFactors) -> Tensor:
        asked.append(factors)
        return gram(factors)

    for module in (geometry_module, cross_module):  # wherever one may be asked for
        monkeypatch.setattr(module, "gram", counted, raising=False)
    given = given_to(model)
    loaded = replace(as_loaded(model), model=decoder_of(model), pair=model, stack="decoder", like=given)
    prompts = [replace(prompt_of(OWN), prepared=given) for _ in range(3)]
    report = inspect(loaded, prompts, InspectOptions(cache=False), lambda *_: None)
    assert all(block.cross is not None and block.cross.stats is not None for block in report.blocks)
    assert len(asked) == 2 * len(report.blocks)  # W' and W'_c of every block
