"""The report's numbers against dense float64, for an adapter, two adapters and a fully tuned checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import adapters
import peft
import pytest
import torch
import transformers
from adapters import weights_of
from safetensors.torch import load_file, save_file

from duat_cli.analysis.lora.weights import adapter_diff, lint, weight_change
from duat_cli.analysis.lora.weights.adapter_diff import adapter_report
from duat_cli.analysis.lora.weights.checkpoint_diff import checkpoint_report
from duat_cli.analysis.lora.weights.weight_change import Directions
from duat_cli.errors import CheckpointError
from duat_cli.loading.adapter.base_weights import BaseWeights, Place
from duat_cli.loading.adapter.folder import open_adapter
from duat_cli.operators import lowrank
from duat_cli.results.base import Run
from duat_cli.results.lora import LoraReport
from duat_cli.results.weight_change import ModuleChange
from duat_cli.text import listed
from duat_cli.zoo import tiny

RUN = Run(started="now", seconds=0.0, peak_memory_bytes=None)


def report(base: Path, *folders: Path, large: bool = False, **how: bool) -> LoraReport:
    opened = [open_adapter(folder, folder.name) for folder in folders]
    return adapter_report(weights_of(base), opened, Directions(large), lambda *a: None, lambda: RUN, **how)


def tuned_report(base: Path, tuned: Path) -> LoraReport:
    return checkpoint_report(weights_of(base), weights_of(tuned), Directions(), lambda *a: None, lambda: RUN)


def key(module: ModuleChange) -> str:
    return f"{module.name}.{module.parameter}"


CONFIGS = {
    "llama": peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj", "embed_tokens"]),
    "gpt2": peft.LoraConfig(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "opt": peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, bias="lora_only"),
}


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("exact", [True, False])
def test_every_number_of_an_adapter(
    model_type: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exact:  # as for large matrices
        monkeypatch.setattr(weight_change, "EXACT_SIDE", 1)
    base = adapters.base_of(model_type, tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS[model_type])
    expected = adapters.merged(base, adapter)
    stored = {name: tensor.double() for name, tensor in adapters.load_base(base).state_dict().items()}
    found = report(base, adapter, large=True)
    assert found.modules
    for module in found.modules:
        change, weight = expected[key(module)], stored[key(module)]
        assert module.frobenius_norm == pytest.approx(float(change.norm()), rel=1e-5)
        assert module.relative_frobenius == pytest.approx(float(change.norm() / weight.norm()), rel=1e-5)
        if change.ndim == 2:
            _check_spectrum(module, change)
            _check_against_base(module, change, weight, exact)
    total = sum(float(expected[key(m)].square().sum()) for m in found.modules)
    assert found.summary.frobenius_norm == pytest.approx(total**0.5, rel=1e-5)


def _check_spectrum(module: ModuleChange, change: torch.Tensor) -> None:
    values = torch.linalg.svdvals(change)
    energy = values.square()
    share = energy / energy.sum()
    assert module.spectral_norm == pytest.approx(float(values[0]), rel=1e-5)
    assert module.stable_rank == pytest.approx(float(energy.sum() / energy[0]), rel=1e-4)
    assert module.entropy_rank == pytest.approx(float((-torch.special.xlogy(share, share).sum()).exp()), rel=1e-3)
    assert module.energy_rank_90 == 1 + int((share.cumsum(0) < 0.9).sum())
    if module.kind == "lora":
        assert module.numerical_rank == module.rank
    assert module.singular_values is not None
    torch.testing.assert_close(
        torch.tensor(module.singular_values).double(), values[: len(module.singular_values)], rtol=1e-4, atol=1e-5
    )


def _check_against_base(module: ModuleChange, change: torch.Tensor, weight: torch.Tensor, exact: bool) -> None:
    """As (out, in), by dense SVDs."""
    turned = module.shape[0] == weight.shape[0] and ("embed" in module.name or ".h." in module.name)
    change, weight = (change.T, weight.T) if turned else (change, weight)
    u, _, vh = torch.linalg.svd(weight, full_matrices=False)
    tu, _, tvh = torch.linalg.svd(weight + change, full_matrices=False)
    k = min(10, len(u.T))
    assert module.intruders is not None
    output = int(((tu[:, :k].T @ u).abs().amax(1) < 0.5).sum())
    into = int(((tvh[:k] @ vh.T).abs().amax(1) < 0.5).sum())
    assert module.intruders.output == output or (not exact and module.intruders.output is None)
    assert module.intruders.input == into or (not exact and module.intruders.input is None)
    cu, _, cvh = torch.linalg.svd(change, full_matrices=False)
    assert module.alignment is not None
    j = module.alignment.j
    if j < 10:  # the rank, so that the subspace does not hang on close singular values
        expected = float((u[:, :k].T @ cu[:, :j]).square().sum()) / min(k, j)
        assert module.alignment.output == pytest.approx(expected, abs=2e-3)
        expected = float((vh[:k] @ cvh[:j].T).square().sum()) / min(k, j)
        assert module.alignment.input == pytest.approx(expected, abs=2e-3)
    assert module.alignment.output_random == pytest.approx(max(k, j) / weight.shape[0])


def test_a_random_subspace_aligns_as_the_reference_says() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        a, b = (torch.linalg.qr(torch.randn(40, n, generator=generator, dtype=torch.float64))[0] for n in (10, 3))
        found.append(float((a.T @ b).square().sum()) / 3)
    assert sum(found) / len(found) == pytest.approx(10 / 40, abs=0.02)


def test_without_the_base_its_own_numbers_are_the_same(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    whole, own = report(base, adapter), report(base, adapter, read_base=False)
    assert [m.frobenius_norm for m in whole.modules] == [m.frobenius_norm for m in own.modules]
    assert all(m.relative_frobenius is None and "--no-base" in m.reasons["relative_frobenius"] for m in own.modules)
    dora = adapters.make(base, tmp_path / "dora", peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    found = report(base, dora, read_base=False)
    assert (found.modules, len(found.skipped)) == ([], 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_adapter_of_one_byte_a_number_is_its_values(dtype: torch.dtype, tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    file = adapter / "adapter_model.safetensors"
    stored = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(stored, file)
    found = report(base, adapter)
    save_file({name: tensor.float() for name, tensor in stored.items()}, file)
    assert found.modules == report(base, adapter).modules


@pytest.mark.parametrize("side", [1, 1024])
def test_an_alignment_that_is_not_found_has_a_reason(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_change, "EXACT_SIDE", side)
    monkeypatch.setattr(weight_change, "leading_of", lambda *_: None)
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for module in report(base, adapter, large=True).modules:
        assert module.alignment is None
        assert module.intruders is not None
        assert module.reasons["alignment"] == weight_change.NOT_FOUND


def test_changes_come_block_after_block(tmp_path: Path) -> None:
    """The file has block 10 in front of block 2, as texts are sorted."""
    config = adapters.load_base(adapters.base_of("llama", tmp_path / "llama")).config
    config.num_hidden_layers = 11
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    adapter = adapters.make(tmp_path / "base", tmp_path / "adapter", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = report(tmp_path / "base", adapter)
    assert [module.name for module in found.modules] == [f"model.layers.{k}.self_attn.q_proj" for k in range(11)]


def test_an_untouched_module_is_no_change(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].zero_()
    save_file(tensors, file)
    found = report(base, adapter)
    assert "model.layers.0.self_attn.q_proj.weight" in found.unchanged
    assert "model.layers.0.self_attn.q_proj" not in {m.name for m in found.modules}
    assert "untouched" in {f.rule for f in found.lint}


def test_every_base_tensor_is_read_and_summed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The findings are those of the linter alone, which finds the norms itself."""
    base = adapters.base_of("llama", tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    adapter = adapters.make(base, tmp_path / "adapter", config)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():  # a change that is zero, one too large, others as they were
        tensor.mul_(0 if "layers.0.self_attn.q_proj.lora_B" in name else 1e3 if "down_proj.lora_B" in name else 1)
    save_file(tensors, file)
    linted = report(base, adapter, lint_only=True).lint
    assert {"magnitude", "untouched"} <= {finding.rule for finding in linted}
    both = report(base, adapter, adapter, lint_only=True)
    where = [one.where if one.where == "adapter" else f"adapter: {one.where}" for one in linted]
    assert [one.where for one in both.lint] == 2 * where
    assert both.summary.changed is both.summary.frobenius_norm is None
    assert both.summary.reasons["changed"] == "with --lint an adapter is checked only"
    read, summed = Counter[str](), list[tuple[int, ...]]()
    reader, energy = BaseWeights.read, lowrank.energy

    def counted(self: BaseWeights, place: Place) -> torch.Tensor:
        read[place.parameter] += 1
        return reader(self, place)

    def sized(tensor: torch.Tensor) -> float:
        summed.append(tuple(tensor.shape))
        return energy(tensor)

    monkeypatch.setattr(BaseWeights, "read", counted)
    for module in (adapter_diff, lint, weight_change):
        monkeypatch.setattr(module, "energy", sized)
    found = report(base, adapter)
    assert found.lint == linted
    assert set(read) == {key(module) for module in found.modules}
    assert set(read.values()) == {1}
    assert sorted(summed) == sorted(tuple(module.shape) for module in found.modules)


# -- two adapters --------------------------------------------------------------------------------------------


def test_two_adapters_of_other_ranks_and_targets(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    first = adapters.make(base, tmp_path / "one", peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]), seed=1)
    second = adapters.make(
        base, tmp_path / "two", peft.LoraConfig(r=2, lora_alpha=20, target_modules=["q_proj"]), seed=2
    )
    one, two = adapters.merged(base, first), adapters.merged(base, second)
    found = report(base, first, second).comparison
    assert found is not None
    assert len(found.modules) == len(found.only_first) == 2
    for module in found.modules:
        a, b = one[f"{module.name}.weight"], two[f"{module.name}.weight"]
        assert module.cosine == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())), abs=1e-5)
        assert module.distance == pytest.approx(float((a - b).norm()), rel=1e-5)
        ua, ub = torch.linalg.svd(a)[0][:, :3], torch.linalg.svd(b)[0][:, :2]
        assert module.output_cosines == pytest.approx(torch.linalg.svdvals(ua.T @ ub).tolist(), abs=1e-3)
    a, b = (
        torch.cat([t[k].flatten() for k in one if k.endswith(("q_proj.weight", "v_proj.weight"))]) for t in (one, two)
    )
    assert found.cosine == pytest.approx(float((a @ b) / (a.norm() * b.norm())), abs=1e-5)


def test_the_same_change_in_another_gauge_and_scale_is_the_same(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    first = adapters.make(base, tmp_path / "one", peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    second = adapters.make(base, tmp_path / "two", peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"]))
    tensors = load_file(first / "adapter_model.safetensors")
    gauge = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
    for name, tensor in tensors.items():
        tensors[name] = torch.linalg.inv(gauge) @ tensor if "lora_A" in name else tensor @ gauge / 2
    save_file({k: v.contiguous() for k, v in tensors.items()}, second / "adapter_model.safetensors")
    found = report(base, first, second).comparison
    assert found is not None
    assert found.cosine == pytest.approx(1.0, abs=1e-6)
    assert all(m.relative_distance is not None and m.relative_distance < 1e-6 for m in found.modules)
    assert all(m.input_cosines == pytest.approx([1.0, 1.0], abs=1e-6) for m in found.modules)


# -- a fully tuned checkpoint --------------------------------------------------------------------------------


def test_a_merged_adapter_is_the_adapter(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).merge_and_unload().save_pretrained(tmp_path / "t")
    by_adapter = {key(m): m for m in report(base, adapter).modules}
    by_tensors = tuned_report(base, tmp_path / "t")
    assert {key(m) for m in by_tensors.modules} == set(by_adapter)
    for module in by_tensors.modules:
        other = by_adapter[key(module)]
        assert module.frobenius_norm == pytest.approx(other.frobenius_norm, rel=1e-5)
        assert module.rounding is not None
        assert module.rounding.rank_above_floor == other.numerical_rank == 3
    assert by_tensors.unchanged
    assert (by_tensors.added, by_tensors.removed) == ([], [])


def test_rounding_to_bfloat16_is_no_rank(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = tiny.tiny_model("llama").bfloat16()
    model.save_pretrained(base)
    generator = torch.Generator().manual_seed(7)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.state_dict()[name]
    change = torch.randn(weight.shape[0], 2, generator=generator) @ torch.randn(2, weight.shape[1], generator=generator)
    with torch.no_grad():
        weight.copy_(weight.float() + 0.1 * weight.float().std() * change)
    model.save_pretrained(tmp_path / "tuned")
    [module] = tuned_report(base, tmp_path / "tuned").modules
    assert key(module) == name
    assert module.numerical_rank is not None
    assert module.numerical_rank > 20
    assert module.rounding is not None
    assert (module.rounding.dtype, module.rounding.rank_above_floor) == ("bfloat16", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_of_the_base_is_no_change_but_for_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    base, cast = adapters.base_of("llama", tmp_path / "base"), tmp_path / "cast"
    model = adapters.load_base(base).to(dtype)
    model.save_pretrained(cast)
    found = tuned_report(base, cast)
    assert (found.modules, len(found.unchanged)) == ([], len(model.state_dict()))
    said = [warning for warning in found.warnings if "rounding" in warning]
    rounding = [f"unchanged up to rounding to bfloat16: {listed(list(model.state_dict()))}"]
    assert said == (rounding if dtype == torch.bfloat16 else [])


LOW = (
    "every changed matrix moves, up to rounding, by a change of rank at most {}: a merged low-rank adapter looks "
    "like this"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merged(folder: Path, dtype: torch.dtype, rank: int, size: float) -> LoraReport:
    """A LoRA with random factors, merged by PEFT in that dtype; size: about |dW| / |W|."""
    model = tiny.tiny_model("llama").to(dtype)
    model.save_pretrained(folder / "base")
    deviation = float(model.state_dict()["model.layers.0.mlp.down_proj.weight"].float().std())
    config = peft.LoraConfig(r=rank, lora_alpha=7, target_modules=["q_proj", "down_proj", "embed_tokens"])
    tuned = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (size * deviation / (7 / rank) / rank**0.5) ** 0.5)
    tuned.merge_and_unload().save_pretrained(folder / "tuned")
    return tuned_report(folder / "base", folder / "tuned")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.05, 1.0, 300.0])
def test_the_rank_of_a_merged_adapter_whatever_the_dtype_and_the_size(
    dtype: torch.dtype, size: float, tmp_path: Path
) -> None:
    found = merged(tmp_path, dtype, 4, size)
    assert len(found.modules) >= 5
    assert LOW.format(4) in found.summary.notable
    for module in found.modules:
        assert module.rounding is not None
        assert module.rounding.rank_above_floor == 4, (key(module), module.singular_values, module.rounding)
        assert module.relative_frobenius is not None
        assert 0.2 * size < module.relative_frobenius < 5 * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_fine_tune_has_full_rank(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.tiny_model("llama").to(dtype)
    model.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.float() * (1 + 0.5 * noise) + 0.05 * noise)
    model.save_pretrained(tmp_path / "tuned")
    found = tuned_report(tmp_path / "base", tmp_path / "tuned")
    assert not any("merged" in line for line in found.summary.notable)
    matrices = [m for m in found.modules if len(m.shape) == 2]
    assert len(matrices) > 10
    for module in matrices:
        assert module.rounding is not None
        assert module.rounding.rank_above_floor is not None
        lost = min(module.shape) - module.rounding.rank_above_floor
        assert lost <= (0 if dtype == torch.float32 else 0.1 * min(module.shape)), (key(module), lost)


def test_a_resized_vocabulary_and_an_added_tensor(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    model = adapters.load_base(base)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 5)
    with torch.no_grad():
        model.get_input_embeddings().weight[1] += 0.5
    model.save_pretrained(tmp_path / "tuned")
    found = tuned_report(base, tmp_path / "tuned")
    [changed] = [m for m in found.modules if m.frobenius_norm]
    assert key(changed) == "model.embed_tokens.weight"
    assert changed.added_rows == 5
    assert changed.numerical_rank == 1
    assert any("resized" in warning for warning in found.warnings)
    adapter = adapters.make(base, tmp_path / "adapter", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    file, table = adapter / "adapter_model.safetensors", load_file(tmp_path / "tuned" / "model.safetensors")
    save_file({**load_file(file), "base_model.model.model.embed_tokens.weight": table[key(changed)]}, file)
    saved = report(base, adapter)
    assert saved.warnings == ["resized: 'model.embed_tokens.weight'; only the common rows are compared"]
    [again] = [m for m in saved.modules if m.added_rows]
    assert (again.added_rows, again.frobenius_norm) == (5, changed.frobenius_norm)


def test_what_has_no_rank_over_rounding_says_why(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    model, names = adapters.load_base(base), ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(1.5)
        model.get_parameter("lm_head.weight")[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "tuned")
    found = {key(module): module for module in tuned_report(base, tmp_path / "tuned").modules}
    vector, matrix, broken = found[names[0]], found[names[1]], found["lm_head.weight"]
    assert matrix.rounding is not None
    assert "rounding" not in matrix.reasons
    assert (vector.rounding, vector.reasons["rounding"]) == (None, weight_change.VECTOR)
    assert (broken.rounding, broken.reasons["rounding"]) == (None, "1 value NaN or infinite")


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    llama, gpt2 = (adapters.base_of(name, tmp_path / name) for name in ("llama", "gpt2"))
    with pytest.raises(CheckpointError, match="is not its base model"):
        tuned_report(llama, gpt2)
    file = tmp_path / "other"
    adapters.base_of("llama", file)
    tensors = load_file(file / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: torch.ones(7, 5)}, file / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight'.*shape mismatch, \[7, 5\]"):
        tuned_report(llama, file)


def test_a_large_difference_has_its_leading_values_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    peft.PeftModel.from_pretrained(adapters.load_base(base), adapter).merge_and_unload().save_pretrained(tmp_path / "t")
    whole = {key(m): m for m in tuned_report(base, tmp_path / "t").modules}
    monkeypatch.setattr(weight_change, "EXACT_SIDE", 1)
    for module in tuned_report(base, tmp_path / "t").modules:
        other = whole[key(module)]
        assert module.frobenius_norm == other.frobenius_norm
        assert module.spectral_norm == pytest.approx(other.spectral_norm, rel=1e-3)
        assert module.stable_rank == pytest.approx(other.stable_rank, rel=1e-3)
        assert module.entropy_rank is None
        assert module.intruders is None
        assert "--directions" in module.reasons["entropy_rank"] + module.reasons["intruders"]
        assert module.rounding is not None
        assert other.rounding is not None
        assert module.rounding.rank_above_floor == other.rounding.rank_above_floor == 3


def test_saved_stacks_heads_and_bases_that_are_not_finite(tmp_path: Path) -> None:
    base = adapters.base_of("llama", tmp_path / "base")
    adapter = adapters.make(base, tmp_path / "adapter", CONFIGS["llama"])
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.score.weight": torch.ones(2, 32)}, file)
    found = report(base, adapter)
    assert found.added == ["score.weight"]
    assert "score" not in {m.name for m in found.modules}
    stored = load_file(base / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("inf")
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    found = report(base, adapter)
    [broken] = [m for m in found.modules if m.name == "model.layers.0.self_attn.q_proj"]
    assert broken.relative_frobenius is None
    assert broken.frobenius_norm is not None
    assert "NaN or Inf" in broken.reasons["relative_frobenius"]
    assert found.summary.relative_frobenius is None


def test_equal_singular_values_are_not_taken_for_one() -> None:
    """One starting vector shows each value once; the energy that is missing tells."""
    assert weight_change._leading_values(0.1 * torch.eye(40, dtype=torch.float64)) is None
