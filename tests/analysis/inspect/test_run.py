"""`inspect` and `verify` end to end on a saved checkpoint: the numbers, their nulls, the cache, and failing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Wiring,
    as_loaded,
    correlation_of,
    dense_blocks,
    effective_number,
    far,
    kronecker_singular_values,
    minilm,
    prompt_of,
    quiet,
    token_ids,
    two_single,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from duat_cli.analysis import geometry as geometry_module
from duat_cli.analysis.decomposition import Decomposition, Step
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.errors import CheckpointError, InputError
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.attention import StoredRows
from duat_cli.report.tables.inspect import render_inspect
from duat_cli.report.tables.page import Page
from duat_cli.results.inspect import InspectReport

Encoded = Callable[..., list[Prompt]]
TEXTS = ("Nui zi created Nui zi dynamics", "def f(x):", "one two three one two")
LLAMA = Wiring("model.layers", "self_attn.o_proj")


def report_of(loaded: LoadedModel, prompts: Encoded, *texts: str, **options: Any) -> InspectReport:
    return inspect(loaded, prompts(loaded, *(texts or TEXTS[:1])), InspectOptions(**options), quiet)


@pytest.fixture(scope="module")
def full(checkpoint: Path, prompts: Encoded) -> InspectReport:
    """On all texts, with what is asked of prompts and terms; it is only read."""
    return report_of(load(str(checkpoint)), prompts, *TEXTS, terms=True, per_prompt=True)


def without_run(report: Any) -> str:
    return report.model_dump_json(exclude={"run"})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(path, value, the object it stands in) of every value of a JSON document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, (dict, list)):
                yield from leaves(inner, f"{path}.{name}")
            else:
                yield f"{path}.{name}", inner, value
    elif isinstance(value, list):
        for k, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{k}]")


# -- the report ----------------------------------------------------------------------------------------------


def test_it_says_what_was_loaded_and_that_it_is_exact(
    full: InspectReport, loaded: LoadedModel, prompts: Encoded
) -> None:
    report, model = full, full.model
    assert (model.model_type, model.architecture) == ("llama", "LlamaForCausalLM")
    assert (model.blocks, model.hidden_size, model.heads, model.kv_heads) == (3, 32, 4, 2)
    assert model.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert [p.tokens for p in report.prompts] == [p.input_ids.shape[1] for p in prompts(loaded, *TEXTS)]
    assert report.certificate.exact
    assert report.certificate.relative_error <= 1e-5
    assert report.certificate.relative_error == max(b.certificate_error for b in report.blocks)
    assert report.certificate.capture == "attention interface"
    assert [b.index for b in report.blocks] == [0, 1, 2]
    assert report.skipped == []
    assert report.environment.dtype == "float32"


def test_its_numbers_are_those_of_the_dense_operator(checkpoint: Path, loaded: LoadedModel, prompts: Encoded) -> None:
    [prompt] = prompts(loaded, TEXTS[1])
    report = inspect(loaded, [prompt], InspectOptions(spectrum=True, threshold=0.5), quiet)
    double = load(str(checkpoint), dtype="float64").model
    n = prompt.input_ids.shape[1]
    for block, dense in zip(report.blocks, dense_blocks(double, prompt.input_ids, LLAMA), strict=True):
        W = dense.W
        side = n * 32
        operator = block.operator
        assert (operator.rows, operator.columns, operator.dense_bytes) == (side, side, 4 * side**2)
        assert far(operator.frobenius_norm, float(W.norm())) <= 1e-5
        top = float(torch.linalg.matrix_norm(W, ord=2))
        assert far(operator.spectral_norm, top) <= 1e-3
        assert far(operator.stable_rank, float(W.square().sum()) / top**2) <= 2e-3
        assert far(operator.effective_heads, effective_number(kronecker_singular_values(W, n))) <= 1e-5
        assert far(operator.block_correlation, correlation_of(W, n)) <= 1e-5
        assert block.density.structural == pytest.approx((n + 1) / (2 * n), rel=1e-12)
        cutoff = 0.5 * float(W.square().mean().sqrt())
        assert block.density.numerical == pytest.approx(float((W.abs() > cutoff).double().mean()), abs=1e-4)


def test_where_w_reads_a_mixer_s_own_values_it_has_their_width() -> None:
    model = two_single("mamba")
    assert model.config.intermediate_size != model.config.hidden_size
    report = inspect(as_loaded(model), [prompt_of(token_ids(model, 4))], InspectOptions(null="uniform"), quiet)
    for block in report.blocks:
        operator, sides = block.operator, (4 * model.config.hidden_size, 4 * model.config.intermediate_size)
        assert (operator.rows, operator.columns) == sides
        assert operator.dense_bytes == 4 * math.prod(sides)
    text = " ".join(render_inspect(report, Page(200)).split())
    assert f"dense it would be {sides[0]} x {sides[1]}," in text
    assert "Heads may look alike untrained as well" in text
    assert "Softmax" not in text


def test_heads_that_write_to_disjoint_columns_fill_half_of_each_block(loaded: LoadedModel, prompts: Encoded) -> None:
    for layer in loaded.model.model.layers:
        value, output = layer.self_attn.v_proj.weight.data, layer.self_attn.o_proj.weight.data
        value.unflatten(0, (2, 16))[0, :, 16:] = 0  # kv head 0 reads the first half of the width, kv head 1 the second
        value.unflatten(0, (2, 16))[1, :, :16] = 0
        output[16:, :32] = 0  # heads 0 and 1 write to the first half, heads 2 and 3 to the second
        output[:16, 32:] = 0
    [prompt] = prompts(loaded, TEXTS[1])
    report = inspect(loaded, [prompt], InspectOptions(cache=False), quiet)
    n = prompt.input_ids.shape[1]
    dense = dense_blocks(loaded.model.double(), prompt.input_ids, LLAMA)
    for block, known in zip(report.blocks, dense, strict=True):
        assert block.density.structural == pytest.approx(float((known.W != 0).double().mean()), abs=1e-12)
        assert block.density.structural == pytest.approx((n + 1) / (4 * n), abs=1e-12)


def test_the_references_are_counted_token_by_token(loaded: LoadedModel, prompts: Encoded) -> None:
    for width in (1, 3, 4):
        report = report_of(loaded, prompts, TEXTS[1], conv_width=width)
        n = report.prompts[0].tokens
        kernel = torch.ones(1, 1, width)
        left = (width - 1) // 2
        columns = [
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(torch.eye(n)[j][None, None], (left, width - 1 - left)), kernel
            )
            for j in range(n)
        ]
        connected = int((torch.cat(columns) != 0).sum())
        density = report.blocks[0].density
        assert density.conv1d_reference == pytest.approx(connected / n**2, rel=1e-12)
        assert (density.linear_reference, density.linear_reference_paper) == pytest.approx((1 / n, 1 / 32))


def test_twice_the_same_input_is_twice_the_same_report(checkpoint: Path, prompts: Encoded) -> None:
    options = {"spectrum": True, "terms": True, "per_prompt": True}
    first, second = (report_of(load(str(checkpoint)), prompts, *TEXTS[:2], **options) for _ in range(2))
    assert without_run(first) == without_run(second)
    other = report_of(load(str(checkpoint)), prompts, TEXTS[1], **options)
    assert without_run(other) != without_run(first)


def test_every_number_is_finite_and_every_null_has_its_reason(
    full: InspectReport, loaded: LoadedModel, prompts: Encoded
) -> None:
    one = (report_of(loaded, prompts, "x", **more) for more in ({}, {"spectrum": True, "layers": frozenset({1})}))
    for report in (full, *one):
        written = report.model_dump_json()
        document = json.loads(written, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
        for path, value, place in leaves(document):
            name = path.rpartition(".")[2]
            if isinstance(value, float):
                assert math.isfinite(value), path
            if value is None and "reasons" in place:
                assert place["reasons"].get(name), path
        assert InspectReport.model_validate_json(written)


def test_the_spectrum_is_null_unless_asked_for(loaded: LoadedModel, prompts: Encoded) -> None:
    without, with_it = (report_of(loaded, prompts, TEXTS[1], spectrum=s).blocks[0].operator for s in (False, True))
    assert without.spectral_norm is without.stable_rank is None
    assert "--spectrum" in without.reasons["spectral_norm"]
    assert with_it.spectral_norm is not None
    assert with_it.reasons == {}
    assert with_it.frobenius_norm == without.frobenius_norm


def test_terms_add_up_at_every_place(full: InspectReport) -> None:
    report = full
    places = [t for b in report.blocks for t in (b.terms, *(p.terms for p in b.prompts or []))]
    for terms in places:
        assert terms.linear.share + terms.static.share + terms.dynamic.share == pytest.approx(1.0, abs=1e-5)
        inner = terms.pre_activation
        assert inner is not None
        assert inner.linear.share + inner.static.share + inner.dynamic.share == pytest.approx(1.0, abs=1e-5)
    assert report.terms is not None
    assert [(t.name, t.kind, t.block) for t in report.terms] == [
        ("x_0", "linear", None), ("bias", "static", None),
        ("block 0", "dynamic", 0), ("block 1", "dynamic", 1), ("block 2", "dynamic", 2),
    ]  # fmt: skip
    last = report.blocks[-1].terms
    assert sum(t.share for t in report.terms) == pytest.approx(1.0, abs=1e-5)
    assert report.terms[0].share == pytest.approx(last.linear.share, abs=1e-9)
    assert report.terms[1].share == pytest.approx(last.static.share, abs=1e-9)
    assert sum(t.share for t in report.terms[2:]) == pytest.approx(last.dynamic.share, abs=1e-5)
    assert abs(last.static.share) > 1e-6  # this checkpoint has biases


def test_means_are_those_of_single_prompts(full: InspectReport, checkpoint: Path, prompts: Encoded) -> None:
    alone = [report_of(load(str(checkpoint)), prompts, text) for text in TEXTS]
    for k, block in enumerate(full.blocks):
        rows = block.prompts
        assert rows is not None
        for row, report in zip(rows, alone, strict=True):
            assert row.operator == report.blocks[k].operator
            assert row.coupling_weighted == report.blocks[k].coupling_weighted
            assert row.terms == report.blocks[k].terms
        entropies = [row.coupling.entropy_bits for row in rows]
        assert block.coupling.entropy_bits == pytest.approx(sum(entropies) / 3, rel=1e-14)
        assert block.certificate_error == max(row.certificate_error for row in rows)
        assert block.spreads is not None
        spread = block.spreads["coupling.entropy_bits"]
        assert (spread.low, spread.high) == (min(entropies), max(entropies))


def test_chosen_layers_have_the_same_numbers_and_the_certificate_covers_all(
    loaded: LoadedModel, prompts: Encoded
) -> None:
    whole, part = report_of(loaded, prompts), report_of(loaded, prompts, layers=frozenset({2, 0}))
    assert [b.index for b in part.blocks] == [0, 2]
    assert part.blocks == [whole.blocks[0], whole.blocks[2]]
    assert part.certificate == whole.certificate
    with pytest.raises(InputError, match="no block 3; the model has blocks 0 to 2"):
        report_of(loaded, prompts, layers=frozenset({3}))


def test_the_summary_is_the_last_block_and_the_means(full: InspectReport) -> None:
    summary, last = full.summary, full.blocks[-1].terms
    assert (summary.linear_share, summary.static_share, summary.dynamic_share) == (
        last.linear.share, last.static.share, last.dynamic.share,
    )  # fmt: skip
    contexts = [b.coupling.effective_context for b in full.blocks]
    assert summary.effective_context == pytest.approx(sum(contexts) / 3)
    assert 1 <= len(summary.notable) <= 3


def test_progress_reaches_its_end(loaded: LoadedModel, prompts: Encoded) -> None:
    seen: list[tuple[int, int]] = []
    inspect(loaded, prompts(loaded, *TEXTS), InspectOptions(), lambda done, total, doing: seen.append((done, total)))
    assert seen[-1] == (9, 9)
    assert [d for d, t in seen if t == 9] == list(range(1, 10))


# -- the cache -----------------------------------------------------------------------------------------------


def test_a_warm_cache_gives_the_same_report_without_the_work(
    checkpoint: Path, prompts: Encoded, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = report_of(load(str(checkpoint)), prompts, cache=False)
    assert not cache.exists()
    cold = report_of(load(str(checkpoint)), prompts)
    [file] = cache.iterdir()

    def again(*args: Any) -> Any:
        raise AssertionError("computed although it is cached")

    monkeypatch.setattr(geometry_module, "gram", again)
    warm = report_of(load(str(checkpoint)), prompts)
    assert without_run(without) == without_run(cold) == without_run(warm)
    assert [file] == list(cache.iterdir())
    with pytest.raises(AssertionError, match="although"):
        report_of(load(str(checkpoint)), prompts, cache=False)


def test_a_broken_cache_is_made_anew(checkpoint: Path, prompts: Encoded, cache: Path) -> None:
    cold = report_of(load(str(checkpoint)), prompts)
    [file] = cache.iterdir()
    sound = file.read_bytes()
    file.write_bytes(b"garbage")
    assert without_run(report_of(load(str(checkpoint)), prompts)) == without_run(cold)
    assert file.read_bytes() == sound


def test_other_weights_have_another_cache(checkpoint: Path, prompts: Encoded, cache: Path) -> None:
    report_of(load(str(checkpoint)), prompts)
    loaded = load(str(checkpoint))
    with torch.no_grad():
        loaded.model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1e-3
    changed = report_of(loaded, prompts)
    assert len(list(cache.iterdir())) == 2
    fresh = load(str(checkpoint))
    with torch.no_grad():
        fresh.model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1e-3
    assert without_run(report_of(fresh, prompts, cache=False)) == without_run(changed)


# -- when it is not so ---------------------------------------------------------------------------------------


def _more_attention(run: Any) -> None:
    call = run.recording.attention[0]
    run.recording.attention[0] = replace(call, rows=StoredRows(call.rows.matrix * 1.01))


def _norm_scale(run: Any) -> None:
    for calls in run.recording.norms.values():
        for norm in calls:
            norm.scale.mul_(1.01)


@pytest.mark.parametrize("corrupt", [_more_attention, _norm_scale])
def test_a_report_that_is_not_exact_says_so(
    loaded: LoadedModel, prompts: Encoded, corrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Decomposition.advance

    def advance(self: Decomposition, run: Any) -> Step:
        corrupt(run)
        return own(self, run)

    monkeypatch.setattr(Decomposition, "advance", advance)
    report = report_of(loaded, prompts)
    assert not report.certificate.exact
    assert report.certificate.relative_error > 10 * report.certificate.tolerance
    assert report.summary.notable == []
    assert not verify(loaded, prompts(loaded, TEXTS[0]), quiet).certificate.exact


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"]
)
def test_weights_that_are_not_finite_are_named_in_one_line(
    checkpoint: Path, tmp_path: Path, prompts: Encoded, name: str, value: float
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name].view(-1)[:] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    broken = load(str(tmp_path))
    with pytest.raises(CheckpointError) as error:
        report_of(broken, prompts)
    text = str(error.value)
    assert name in text
    assert "NaN or infinite" in text
    assert "\n" not in text


def test_a_nan_that_no_prompt_reaches_is_a_warning(checkpoint: Path, tmp_path: Path, prompts: Encoded) -> None:
    """One row of the embedding that the prompt does not use: the report stands, with the warning."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][263] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    report = report_of(load(str(tmp_path)), prompts)
    assert report.certificate.exact
    assert any("embed_tokens" in w for w in report.warnings)


# -- real checkpoints ----------------------------------------------------------------------------------------


def test_minilm_is_exact(prompts: Encoded) -> None:
    """all-MiniLM-L6-v2: trained weights, post-norm, 6 blocks of 12 heads."""
    loaded = load(str(minilm()))
    [prompt] = prompts(loaded, "The cat sat.")
    report = inspect(loaded, [prompt], InspectOptions(), quiet)
    assert report.certificate.exact
    assert report.certificate.relative_error <= 1e-5
    assert (report.model.blocks, report.model.hidden_size, report.model.heads) == (6, 384, 12)
    assert report.skipped == []
    expected = dense_coupling(loaded.model.double(), prompt.input_ids, 0)
    n = prompt.input_ids.shape[1]
    assert report.blocks[0].operator.frobenius_norm == pytest.approx(float(expected.norm()), rel=1e-5)
    assert report.blocks[0].density.structural == 1.0
    assert report.blocks[0].coupling.off_diagonal_share == pytest.approx(
        1 - float(expected.diagonal().square().sum() / expected.square().sum()), rel=1e-5
    )
    assert expected.shape == (n, n)


def dense_coupling(model: Any, ids: Tensor, index: int) -> Tensor:
    """C of one block from the weights: ‖Σ_h H_h[i, j] (W_O,h W_V,h)‖_F, head by head."""
    base = getattr(model, "bert", model)
    with torch.no_grad():
        H = base(input_ids=ids, output_attentions=True).attentions[index][0]
        attention = base.encoder.layer[index].attention
        V, out = attention.self.value.weight, attention.output.dense.weight
        d = V.shape[0] // len(H)
        maps = [out[:, h * d : (h + 1) * d] @ V[h * d : (h + 1) * d] for h in range(len(H))]
        n = H.shape[-1]
        norms = [[float(sum(H[h, i, j] * maps[h] for h in range(len(H))).norm()) for j in range(n)] for i in range(n)]
    return torch.tensor(norms, dtype=torch.float64)
