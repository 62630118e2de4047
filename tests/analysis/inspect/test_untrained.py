"""The null of the architecture re-initialised: against a model re-initialised by hand, its cache, and its absence."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    WIRINGS,
    Wiring,
    as_loaded,
    correlation_of,
    coupling_of,
    dense_blocks,
    effective_number,
    far,
    kronecker_singular_values,
    naive_coupling_numbers,
    quiet,
    single_model,
    two_single,
    weighted_coupling_of,
)

from duat_cli.analysis.inspect import untrained as untrained_module
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.untrained import Untrained, untrained
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.checkpoint.preflight import inspect_folder
from duat_cli.loading.checkpoint.source import Source
from duat_cli.loading.model.load import LoadedModel, load, load_files
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.structure import discover
from duat_cli.models.edits.reinitialised import SEED, random_ids, reinitialised, seeded
from duat_cli.results.operator import NullStats
from duat_cli.zoo import tiny

THRESHOLD = 0.3
Encoded = Callable[..., list[Prompt]]


def alone(model: Any) -> Processes:
    return Processes(1, quiet, model)


def of(model: Any, counts: list[int], cache: bool = False) -> Untrained:
    return untrained(as_loaded(model), 2, counts, THRESHOLD, cache=cache, processes=alone(model))


def known(null: NullStats | str) -> NullStats:
    assert isinstance(null, NullStats), null
    return null


def at(nulls: Untrained, block: int, tokens: int) -> NullStats | str:
    found = nulls(tokens)
    return found if isinstance(found, str) else found[block]


# -- the numbers -----------------------------------------------------------------------------------------------


DENSE = {name: (None, WIRINGS[name]) for name in ("llama", "gpt2", "bert", "gemma2", "mixtral")} | {
    "funnel": ("decoder.layers", Wiring("funnel.decoder.layers", "attention.post_proj")),
    "dory": ("layers", Wiring("model.layers", "post_attention_layernorm")),  # times a constant
}


@pytest.mark.parametrize("model_type", DENSE)
def test_every_number_is_that_of_the_dense_operator_of_a_model_built_anew(model_type: str) -> None:
    """Built by hand from the config with the same seed, W' by automatic differentiation in float64; also of one stack
    of several, and of blocks between which the model changes the stream."""
    chain, wiring = DENSE[model_type]
    model = two_single(model_type) if chain is None else single_model(model_type)
    calls = discover(model, chain=chain, factors=False).calls
    last = {block: index for index, block in enumerate(calls)}  # Dory runs two of its blocks twice
    trained = dataclasses.replace(as_loaded(model), chain=chain)
    nulls = untrained(trained, len(calls), [7], THRESHOLD, cache=False, processes=alone(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        fresh = type(model)._from_config(model.config, attn_implementation="eager").eval()
    ids = random_ids(model.config, 7)
    double = fresh.double()
    if getattr(double, "_can_set_experts_implementation", lambda: False)():
        double.set_experts_implementation("eager")
    for index, dense in zip(last.values(), dense_blocks(double, ids, wiring), strict=True):
        null, W, n = known(at(nulls, index, 7)), dense.W, 7
        assert far(null.operator.effective_heads, effective_number(kronecker_singular_values(W, n))) <= 1e-4
        assert far(null.operator.block_correlation, correlation_of(W, n)) <= 1e-4
        assert far(null.density.structural, float((W != 0).double().mean())) <= 1e-12
        size = W.abs()
        cutoff = THRESHOLD * float(W.square().mean().sqrt())
        on_the_line = float(((size / cutoff - 1).abs() < 1e-4).double().mean())
        assert abs(null.density.numerical - float((size > cutoff).double().mean())) <= on_the_line + 1e-12
        for numbers, C in (
            (null.coupling, coupling_of(W, n)),
            (null.coupling_weighted, weighted_coupling_of(W, dense.x)),
        ):
            for name, expected in naive_coupling_numbers(C).items():
                assert far(getattr(numbers, name), expected) <= 1e-4, name


def test_an_untrained_model_is_its_own_null_nearly() -> None:
    """GPT-2 without training: blocks all alike, one head in effect, whatever the number of heads."""
    model = reinitialised(two_single("gpt2"))
    null = known(at(of(model, [9]), 0, 9))
    assert null.operator.block_correlation > 0.98
    assert null.operator.effective_heads < 1.2


def test_ids_are_ordinary_and_the_shorter_ones_begin_the_longer() -> None:
    config = two_single("llama").config
    config.eos_token_id = [11, 12]
    ids = random_ids(config, 500)
    assert ids.shape == (1, 500)
    assert int(ids.min()) >= 10
    assert int(ids.max()) < config.vocab_size
    assert not {11, 12, config.pad_token_id, config.bos_token_id} & set(ids[0].tolist())
    assert torch.equal(random_ids(config, 40), ids[:, :40])


def test_no_generator_notices() -> None:
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(5)
    expected = (torch.rand(3), random.random(), np.random.rand())
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(5)
    first = reinitialised(two_single("llama"))
    model = two_single("llama")
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(5)
    second = reinitialised(model)
    of(model, [5])
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    with seeded():
        one = torch.rand(3)
    with seeded():
        assert torch.equal(torch.rand(3), one)


def test_the_trained_model_is_left_alone() -> None:
    model = two_single("llama")
    before, config = [p.clone() for p in model.parameters()], model.config.to_json_string(use_diff=False)
    of(model, [5])
    assert all(map(torch.equal, before, model.parameters()))
    assert model.config.to_json_string(use_diff=False) == config


def test_every_count_of_tokens_is_run_once_and_no_other_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    own = untrained_module._Runs.numbers

    def numbers(self: Any, tokens: int) -> Any:
        ran.append(tokens)
        return own(self, tokens)

    monkeypatch.setattr(untrained_module._Runs, "numbers", numbers)
    nulls = of(two_single("llama"), [*range(1, 21), 5, 5])
    assert ran == [*range(1, 21)]
    for tokens in (2, 7, 20):
        assert known(at(nulls, 1, tokens)).density.structural == pytest.approx((tokens + 1) / (2 * tokens))


# -- in the report ---------------------------------------------------------------------------------------------


def test_a_report_holds_the_means_over_its_prompts(loaded: LoadedModel, prompts: Encoded) -> None:
    inputs = prompts(loaded, "def f(x):", "one two three one two", "def g(y):")
    report = inspect(loaded, inputs, InspectOptions(null="all", threshold=THRESHOLD, per_prompt=True), quiet)
    counts = [p.tokens for p in report.prompts]
    nulls = untrained(loaded, 3, counts, THRESHOLD, cache=False, processes=alone(loaded.model))
    for block in report.blocks:
        rows = [known(at(nulls, block.index, count)) for count in counts]
        for prompt, row in zip(block.prompts or [], rows, strict=True):
            assert prompt.null.reinitialised == row
            assert prompt.null.uniform is not None
        null = known(block.null.reinitialised or "absent")
        contexts = [row.coupling.effective_context or 0 for row in rows]
        assert null.coupling.effective_context == pytest.approx(sum(contexts) / 3, rel=1e-12)
        assert block.null.reasons == {}


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_drawn_block_by_block_it_has_the_same_numbers(model_type: str, tmp_path: Path) -> None:
    tiny.tiny_model(model_type).save_pretrained(tmp_path)
    place, files = Source(tmp_path, "tiny", None), inspect_folder(tmp_path)
    reports = []
    for paged in (False, True):
        model = load_files(place, files, paged=paged)
        inputs = [Prompt("", "", random_ids(model.model.config, count), count) for count in (7, 5, 7)]
        reports.append(inspect(model, inputs, InspectOptions(null="all", cache=False), quiet))
    whole, parts = (report.model_dump(mode="json", exclude={"run"}) for report in reports)
    assert whole["blocks"][0]["null"]["reinitialised"] is not None
    assert parts == whole


def test_drawn_block_by_block_it_is_the_same_document(loaded: LoadedModel, prompts: Encoded, cache: Path) -> None:
    place = Source(loaded.files.path, loaded.name, None)
    parts = load_files(place, loaded.files, paged=True)
    for model in (loaded, parts):
        report = inspect(model, prompts(loaded, "def f(x):"), InspectOptions(null="all"), quiet)
        assert report.blocks[0].null.reinitialised is not None
        assert len(list(cache.glob("null*"))) == 1


def test_unasked_it_is_null_with_its_reason_and_costs_nothing(
    loaded: LoadedModel, prompts: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrained_module, "reinitialised", lambda model: pytest.fail("built"))
    report = inspect(loaded, prompts(loaded, "def f(x):"), InspectOptions(), quiet)
    for block in report.blocks:
        assert block.null.uniform is not None
        assert block.null.reinitialised is None
        assert "--null all" in block.null.reasons["reinitialised"]


# -- the cache -------------------------------------------------------------------------------------------------


def test_the_cache_changes_no_number_and_saves_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    without = of(model, [5, 8])
    assert not cache.exists()
    cold = of(model, [5, 8], cache=True)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(untrained_module, "reinitialised", lambda model: pytest.fail("built again"))
    warm = of(model, [8, 5], cache=True)
    for index in range(2):
        for tokens in (5, 8):
            assert at(without, index, tokens) == at(cold, index, tokens) == at(warm, index, tokens)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NullStats | str]]:
    """The file of the null of a llama, of 5 tokens, and its numbers."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUAT_CACHE", str(folder))
        found = of(two_single("llama"), [5], cache=True)
    [file] = folder.iterdir()
    return file, [at(found, block, 5) for block in range(2)]


def assert_made_anew(content: str, kept: tuple[Path, list[NullStats | str]], cache: Path) -> None:
    sound, numbers = kept
    cache.mkdir()
    file = cache / sound.name
    file.write_text(content)
    found = of(two_single("llama"), [5], cache=True)
    assert [at(found, block, 5) for block in range(2)] == numbers
    assert file.read_text() == sound.read_text()
    assert list(cache.iterdir()) == [file]


def test_what_another_version_kept_without_a_statistic_is_made_anew(
    kept: tuple[Path, list[NullStats | str]], cache: Path
) -> None:
    older = json.loads(kept[0].read_text())
    del older["document"][1]["coupling"]["mean_distance"]
    assert_made_anew(json.dumps(older), kept, cache)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "document": []}', "[" * 100_000])
def test_a_broken_file_is_made_anew(content: str, kept: tuple[Path, list[NullStats | str]], cache: Path) -> None:
    assert_made_anew(content, kept, cache)


def test_another_config_dtype_count_or_threshold_is_another_file(cache: Path) -> None:
    model = two_single("llama")
    of(model, [5], cache=True)
    untrained(as_loaded(model), 2, [5], 0.1, cache=True, processes=alone(model))
    of(two_single("llama").double(), [5], cache=True)
    other = two_single("llama")
    other.config.rms_norm_eps = 0.25
    of(other, [5], cache=True)
    assert len(list(cache.iterdir())) == 4


# -- where there is none ---------------------------------------------------------------------------------------


def absent(model: Any) -> str:
    null = at(of(model, [5]), 0, 5)
    assert isinstance(null, str)
    return null


def test_a_second_model_that_does_not_fit_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrained_module, "available_memory", lambda: 1000.0)
    monkeypatch.setattr(untrained_module, "reinitialised", lambda model: pytest.fail("built"))
    assert "a second model needs" in absent(two_single("llama"))


def test_a_class_that_cannot_be_built_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Any:
        raise TypeError("it takes two arguments")

    monkeypatch.setattr(untrained_module, "reinitialised", refuse)
    assert "LlamaForCausalLM cannot be built from its config: TypeError: it takes two" in absent(two_single("llama"))


def test_a_fresh_model_that_is_not_understood_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError("its blocks were not found")

    monkeypatch.setattr(untrained_module, "discover", refuse)
    assert "its blocks were not found" in absent(two_single("llama"))


def test_a_fresh_model_that_is_not_exact_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    own = untrained_module.Decomposition.advance

    def advance(self: Any, run: Any) -> Any:
        step = own(self, run)
        return dataclasses.replace(step, each=[dataclasses.replace(step.terms, error=1.0)])

    monkeypatch.setattr(untrained_module.Decomposition, "advance", advance)
    assert "not exact" in absent(two_single("llama"))


def test_a_report_stands_without_it(checkpoint: Path, prompts: Encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(checkpoint))
    monkeypatch.setattr(untrained_module, "available_memory", lambda: 0.0)
    report = inspect(loaded, prompts(loaded, "def f(x):"), InspectOptions(null="all", cache=False), quiet)
    assert report.certificate.exact
    for block in report.blocks:
        assert block.null.reinitialised is None
        assert "a second model needs" in block.null.reasons["reinitialised"]
        assert block.null.uniform is not None
