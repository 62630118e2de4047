"""The explicit matrices of tiny models against the models' own attention; the checks can fail."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from decoders import save_t5
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, T5ForConditionalGeneration

import duat_cli as duat
from duat_cli.analysis import decomposition
from duat_cli.analysis.matrix import case as matrix_case
from duat_cli.analysis.matrix import run as subject
from duat_cli.analysis.operator_file import OperatorFile
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import relative_error
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.operators import paper
from duat_cli.report.json import to_json
from duat_cli.report.tables.matrix import render_matrix
from duat_cli.report.tables.page import Page
from duat_cli.results.matrix import MatrixReport
from duat_cli.zoo import tiny

WIRINGS = ("llama", "gpt2", "bert", "olmo2", "gemma2", "bloom", "deepseek_v3", "t5", "diffllama")
TOKENS = 7


def loaded(model_type: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = tiny.tiny_model(model_type).to(dtype)
    name = str(dtype).removeprefix("torch.")
    return LoadedModel(model, model_type, None, cast(Any, SimpleNamespace(quantised=None)), name, "cpu", (), {})


def prompt_of(model: LoadedModel, tokens: int = TOKENS) -> Prompt:
    return Prompt("", "0" * 64, tiny.tiny_inputs(model.model, tokens)["input_ids"], 1)


def says(token: int) -> str:
    return f"t\x1b{token}"


@dataclasses.dataclass(frozen=True)
class Found:
    """The report, and the tensors of the file by the last part of their names."""

    report: MatrixReport
    tensors: dict[str, Tensor]


def matrices(model: LoadedModel, layer: int = 1, tokens: int = TOKENS, *, dense: bool = True) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        file = OperatorFile(path, says, "--output")
        try:
            report = subject.matrix(model, prompt_of(model, tokens), layer, says, lambda *_: None, file, dense=dense)
        finally:
            file.close()
        return Found(report, {name.rpartition(".")[2]: tensor for name, tensor in load_file(path).items()})


def verdicts(report: MatrixReport) -> dict[str, bool | None]:
    return {check.name: check.holds for check in report.checks}


def by_factors(tensors: dict[str, Tensor]) -> Tensor:
    """The rule in the file's metadata, head by head."""
    H, s, t, value, output, x = (tensors[name] for name in ("H", "s", "t", "V", "O", "x"))
    groups = len(H) // len(value)
    heads = [(t[:, None] * H[h] * s[h]) @ (x @ value[h // groups]) @ output[h] for h in range(len(H))]
    return torch.stack(heads).sum(0)


@pytest.mark.parametrize("model_type", WIRINGS)
def test_every_check_holds_and_both_files_give_the_contribution(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(model_type)
    dense = matrices(model)
    assert dense.report.certificate.exact
    assert set(verdicts(dense.report).values()) == {True}
    made = dense.tensors
    x, contribution = (made[name].reshape(-1) for name in ("x", "contribution"))
    assert contribution.norm() > 0
    assert relative_error(made["W_HVO"] @ x, contribution) < 1e-5
    assert relative_error(made["W_O"] @ (made["W_HV"] @ x), contribution) < 1e-5

    monkeypatch.setattr(matrix_case, "DENSE_SIDE", 8)
    factors = matrices(model, dense=False)
    assert not factors.report.dense
    assert relative_error(by_factors(factors.tensors), factors.tensors["contribution"]) < 1e-5
    assert "W_HVO" not in factors.tensors
    assert torch.equal(factors.tensors["contribution"], made["contribution"])
    unchecked = [name for name, holds in verdicts(factors.report).items() if holds is None]
    assert unchecked == ["product", "coupling", "convolution", "orientation"]
    for small, large in zip(dense.report.matrices, factors.report.matrices, strict=True):
        assert small.shape == large.shape
        assert small.density == pytest.approx(large.density)
    assert factors.report.corner == dense.report.corner
    assert factors.report.coupling == dense.report.coupling


def test_a_dense_matrix_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_case, "DENSE_SIDE", 8)
    with pytest.raises(InputError, match=r"--dense: the longest side of W', .*, is over"):
        matrices(loaded("llama"))


def test_the_contribution_is_the_output_projection_without_its_constants() -> None:
    """gpt2 adds c_proj's output to the stream; what the input moves there is less b_V W_O and b_O."""
    model = loaded("gpt2")
    block = model.model.base_model.h[1]
    seen: list[Tensor] = []
    handle = block.attn.c_proj.register_forward_hook(lambda m, args, output: seen.append(output[0]))
    with torch.no_grad():
        model.model(**tiny.tiny_inputs(model.model))
    handle.remove()
    width = block.attn.c_proj.weight.shape[0]
    offset = block.attn.c_attn.bias[-width:] + block.ln_1.bias @ block.attn.c_attn.weight[:, -width:]
    constant = offset @ block.attn.c_proj.weight + block.attn.c_proj.bias  # each row of H sums to 1
    own = matrices(model).tensors["contribution"]
    assert relative_error(own, seen[0] - constant) < 1e-5


def test_shapes_densities_and_what_is_shown() -> None:
    report = matrices(loaded("llama"), tokens=9).report
    N, M, inner = report.tokens, report.hidden_size, report.heads * report.head_width
    forms = {form.name: form for form in report.matrices}
    assert forms["x'"].shape == [N * M]
    assert forms["W'_HV"].shape == [N * inner, N * M]
    assert forms["W'_O"].shape == [N * M, N * inner]
    assert forms["W'_HVO"].shape == [N * M, N * M]
    assert forms["W (x) I_M"].shape == [M * M, inner * M]
    assert forms["W'_HVO"].density == pytest.approx((N + 1) / (2 * N))
    assert forms["W'_O"].density == pytest.approx(1 / N)
    assert forms["W (x) I_M"].density == pytest.approx(1 / M)
    assert report.kv_heads < report.heads
    assert len(report.coupling) == len(report.token_texts) == 8
    assert report.coupling[0][1:] == [0.0] * 7
    assert report.token_texts[0] == f"t\\x1b{prompt_of(loaded('llama'), 9).input_ids[0, 0]}"


def test_the_corner_is_the_matrix() -> None:
    found = matrices(loaded("olmo2"))
    assert relative_error(torch.tensor(found.report.corner), found.tensors["W_HVO"][:6, :6]) < 1e-5


def test_what_the_papers_say_stands_beside_what_is_expected() -> None:
    forms = {form.name: form for form in matrices(loaded("llama"), tokens=9).report.matrices}
    assert "1/h = 25 % before a mask" in (forms["W'_HV"].papers or "")
    assert "almost devoid of zero elements" in (forms["W'_HVO"].papers or "")
    assert "is 1/M" in (forms["W (x) I_M"].papers or "")
    assert (forms["W'_O"].papers, "papers" in forms["W'_O"].reasons) == (None, True)


def test_heads_that_read_slices_of_x_leave_one_in_h_entries() -> None:
    """The papers' W'_HV, entry by entry: head h maps its own d columns of x (DUAT, Eq. 7-8)."""
    heads, tokens, d = 4, 3, 2
    filled = sum(
        source // d == head  # of (row token, head, b; column token, source): b and both tokens do not matter
        for head in range(heads)
        for _ in range(tokens * d * tokens)
        for source in range(heads * d)
    )
    assert filled / (tokens * heads * d * tokens * heads * d) == 1 / heads
    sliced = torch.zeros(heads, heads * d, d)
    for head in range(heads):
        sliced[head, head * d : (head + 1) * d] = 1.0
    assert paper.density(paper.attention_value_matrix(torch.ones(heads, tokens, tokens), sliced)) == 1 / heads


def test_without_a_causal_mask_the_density_is_one() -> None:
    form = next(f for f in matrices(loaded("bert")).report.matrices if f.name == "W'_HVO")
    assert (form.density, form.expected_density) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("model_type", "dtype", "bound"), [("gpt2", torch.float64, 1e-12), ("llama", torch.bfloat16, 5e-2)]
)
def test_other_dtypes(model_type: str, dtype: torch.dtype, bound: float) -> None:
    found = matrices(loaded(model_type, dtype))
    errors = {check.name: check.relative_error for check in found.report.checks}
    assert set(verdicts(found.report).values()) == {True}
    assert cast(float, errors["contribution"]) < bound
    assert found.tensors["W_HVO"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(
    ("part", "failing"), [("rows", {"contribution", "heads"}), ("output", {"contribution", "projection"})]
)
def test_a_wrong_factor_is_found(part: str, failing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> AttentionOperator:
        operator = subject_operator_of(*args)
        if part == "rows":
            return dataclasses.replace(operator, source_scale=operator.source_scale * 1.01)
        factors = dataclasses.replace(operator.factors, output=operator.factors.output * 1.01)
        return dataclasses.replace(operator, factors=factors)

    subject_operator_of = decomposition.operator_of
    monkeypatch.setattr(decomposition, "operator_of", spoiled)
    report = matrices(loaded("llama")).report
    assert {name for name, holds in verdicts(report).items() if holds is False} == failing


def test_zero_attention_holds_without_a_number_that_is_not_finite() -> None:
    model = loaded("llama")
    with torch.no_grad():
        cast(nn.Linear, model.model.base_model.layers[1].self_attn.o_proj).weight.zero_()
    report = matrices(model).report
    json.loads(to_json(report), parse_constant=pytest.fail)
    assert False not in verdicts(report).values()


def test_one_token() -> None:
    report = matrices(loaded("llama"), tokens=1).report
    assert set(verdicts(report).values()) == {True}
    assert len(report.coupling) == 1
    told = [form.expected_formula or "" for form in report.matrices]
    assert any("1, one token" in one for one in told)
    assert not any("causal" in one for one in told)  # one token does not tell


def test_no_such_block() -> None:
    with pytest.raises(InputError, match=r"--layer 99: no such block; the model has blocks 0 to \d"):
        matrices(loaded("llama"), layer=99)


def test_a_decoders_block_has_the_matrices_of_its_self_attention(tmp_path: Path) -> None:
    """W'_HVO times the stream is what self-attention adds in the whole model, where T5 has no biases."""
    folder, file = save_t5(tmp_path / "t5"), tmp_path / "w.safetensors"
    asked = {"stack": "decoder", "layer": 1, "prompt": "abc", "decoder_prompt": "wxyz", "dtype": "float64"}
    report = duat.matrix(folder, output=file, dense=True, **asked)
    assert set(verdicts(report).values()) == {True}
    assert report.certificate.exact
    assert any("W'_c of its cross-attention" in warning for warning in report.warnings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = T5ForConditionalGeneration.from_pretrained(folder).double()
    own = model.prepare_decoder_input_ids_from_labels(torch.tensor([tokenizer("wxyz")["input_ids"]]))
    added: list[Tensor] = []
    block = model.decoder.block[1].layer[0].SelfAttention
    block.register_forward_hook(lambda m, args, output: added.append(output[0][0]))
    with torch.no_grad():
        ids = torch.tensor([tokenizer("abc")["input_ids"]])
        seen = model(input_ids=ids, decoder_input_ids=own, output_hidden_states=True, use_cache=False)
    [W] = [value for name, value in load_file(file).items() if name.endswith("W_HVO")]
    x = seen.decoder_hidden_states[1][0]
    assert relative_error(W @ x.reshape(-1), added[0].reshape(-1)) <= 1e-6  # T5's norms compute in float32


def test_a_block_without_factors_is_refused_with_the_reason() -> None:
    model = loaded("jamba")
    with pytest.raises(UnsupportedModelError, match=r"block 0 \(layers.0\) .*: its W' reads values that"):
        matrices(model, layer=0)
    assert set(verdicts(matrices(model, layer=1).report).values()) == {True}


@pytest.mark.parametrize("width", [30, 72, 80, 120])
def test_the_page_keeps_its_width_and_every_number(width: int) -> None:
    report = matrices(loaded("llama"), tokens=9).report
    text = render_matrix(report, Page(width=width))
    assert max(map(len, text.split("\n"))) <= width
    assert text.count("holds") == len(report.checks)
    assert text.count("'t\\x1b") >= 8
    assert "\x1b" not in text


def test_vectors_that_are_not_the_prompts_tokens_get_no_texts() -> None:
    """cpmant puts 4 vectors of its own in front of the prompt."""
    report = matrices(loaded("cpmant")).report
    assert (report.tokens, report.prompt.tokens, report.token_texts) == (TOKENS + 4, TOKENS, [])
    assert "FAILS" not in render_matrix(report, Page())


@pytest.mark.parametrize(("model_type", "tokens"), [("llama", 7), ("bert", 5), ("gpt2", 1)])
def test_a_convolution_stands_beside_attention(model_type: str, tokens: int) -> None:
    model = loaded(model_type)
    report = matrices(model, tokens=tokens, dense=False).report
    forms = {form.name: form for form in report.matrices}
    M = report.hidden_size
    read = [sum(abs(i - j) <= 1 for j in range(tokens)) for i in range(tokens)]
    assert forms["W'_conv"].shape == forms["W'_HVO"].shape == [tokens * M, tokens * M]
    assert forms["W'_conv"].built
    assert forms["W'_conv"].density == pytest.approx(sum(read) / tokens**2)
    assert forms["W'_conv"].expected_density == pytest.approx(sum(read) / tokens**2)
    assert report.convolution.tokens_read == pytest.approx(sum(read) / tokens)
    seen = range(1, tokens + 1) if model_type != "bert" else [tokens] * tokens
    assert report.convolution.attention_tokens_read == pytest.approx(sum(seen) / tokens)
    assert verdicts(report)["convolution"] is True


def test_the_convolutions_coupling_is_that_of_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    own = paper.conv1d_matrix

    def keeping(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(own(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(paper, "conv1d_matrix", keeping)
    report = matrices(loaded("llama")).report
    blocks = kept[0].reshape(TOKENS, report.hidden_size, TOKENS, report.hidden_size).double()
    norms = torch.linalg.vector_norm(blocks, dim=(1, 3))
    assert relative_error(torch.tensor(report.convolution.coupling, dtype=torch.float64), norms) < 1e-6
    monkeypatch.setattr(matrix_case, "DENSE_SIDE", 8)
    small = {form.name: form for form in matrices(loaded("llama"), dense=False).report.matrices}
    assert not small["W'_conv"].built
    assert small["W'_conv"].density == pytest.approx(paper.density(kept[0]))


@pytest.mark.parametrize("left_over", [0.0, 1e-4])
def test_heads_that_cancel_each_other_fail_no_check(left_over: float) -> None:
    model = loaded("llama")
    attention = model.model.model.layers[1].self_attn
    width, heads = attention.head_dim, attention.config.num_attention_heads
    with torch.no_grad():
        for layer, count in ((attention.q_proj, heads), (attention.k_proj, 2), (attention.v_proj, 2)):
            layer.weight.copy_(layer.weight[:width].repeat(count, 1))
        signs = torch.tensor([1.0, -1.0]).repeat(heads // 2).repeat_interleave(width)
        output = attention.o_proj.weight
        rest = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        output.copy_(output[:, :width].repeat(1, heads) * signs + left_over * rest)
    report = matrices(model).report
    found = verdicts(report)
    assert found["heads"]
    assert not [name for name, holds in found.items() if holds is False]
    assert found["coupling"] is (True if left_over else None)
    assert all(check.tolerance < 1e-2 for check in report.checks)
