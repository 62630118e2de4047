"""Prompts in a batch against each alone: the same numbers, in every architecture that allows it; and who goes together.

The second way is the ordinary path, prompt by prompt, which other tests hold against dense matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import InDouble, as_loaded, double_model, prompt_of, quiet, single_model, two_single
from hypothesis import given
from hypothesis import strategies as st
from paging import WHOLE
from torch import Tensor, nn

from duat_cli.analysis.inspect import batch as module
from duat_cli.analysis.inspect import sweep as sweep_module
from duat_cli.analysis.inspect.batch import batches, leaders, sizes
from duat_cli.analysis.inspect.maps import Maps
from duat_cli.analysis.inspect.options import Filled, InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.sweep import sweep_batch, sweep_prompts
from duat_cli.analysis.inspect.total import PromptSweep
from duat_cli.analysis.session import Session
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.prompts import Prompt
from duat_cli.models import budgets
from duat_cli.results.inspect import InspectReport

OPTIONS = InspectOptions(threshold=0.3, cache=False)
TYPES = ["llama", "gpt2", "bert", "gemma2", "gpt_neox", "mixtral", "gpt_oss", "deepseek_v3", "granite", "t5", "olmo2"]
ONE_BY_ONE = [
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "qwen3_next",
    "diffllama",
    "gemma3n_text",  # several streams a token
    "falcon_h1",  # a mixer beside attention has an operator of its own, which a batch does not give
]


def prompts_of(model: Any, count: int, tokens: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    rows = model.get_input_embeddings().weight.shape[0]
    return [prompt_of(ids[None]) for ids in torch.randint(10, rows, (count, tokens), generator=generator)]


def begun(model: Any, prompts: list[Prompt]) -> Session:
    """A session that has run a prompt."""
    session = Session(as_loaded(model), quiet, cache=False)
    sweep_prompts(session, prompts[:1], OPTIONS, quiet)
    return session


@pytest.fixture(scope="module")
def session() -> Session:
    """Of a llama, which is only asked."""
    model = two_single("llama")
    return begun(model, prompts_of(model, 1, 7))


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a prompt's blocks with where it stands."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from numbers(value, f"{path}.{name}")
    else:
        yield path, found


def differences(got: list[PromptSweep], expected: list[PromptSweep]) -> dict[str, float]:
    """The largest of each number, relative to one at least; texts and nulls have to be equal."""
    worst: dict[str, float] = {}
    for one, other in zip(got, expected, strict=True):
        assert one.blocks.keys() == other.blocks.keys()
        assert one.faults == other.faults
        for index, block in one.blocks.items():
            mine, theirs = (numbers(b.model_dump(exclude={"prompt"})) for b in (block, other.blocks[index]))
            for (path, a), (same, b) in zip(mine, theirs, strict=True):
                assert path == same
                if not isinstance(a, float) or not isinstance(b, float):
                    assert a == b, path
                    continue
                worst[path] = max(worst.get(path, 0.0), abs(a - b) / max(1.0, abs(b)))
            assert one.largest[index][1] == other.largest[index][1]
            assert one.largest[index][0] == pytest.approx(other.largest[index][0], rel=1e-5)
    return worst


@pytest.mark.parametrize("model_type", TYPES)
def test_a_batch_gives_each_prompt_its_own_numbers(model_type: str) -> None:
    model = two_single(model_type)
    session = begun(model, prompts_of(model, 1, 7))
    for tokens in (1, 7):
        prompts = prompts_of(model, 3, tokens)
        got = sweep_batch(session, prompts, OPTIONS)
        assert got is not None
        worst = differences(got, sweep_prompts(session, prompts, OPTIONS, quiet))
        assert len(worst) > 40
        assert max(worst.values()) < 2e-5, worst
        assert all(error < 1e-5 for sweep in got for error in sweep.errors)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "gemma2"])
def test_in_float64_it_is_equal_to_its_last_digits(model_type: str) -> None:
    model = double_model(model_type)
    with InDouble():
        prompts = prompts_of(model, 4, 6)
        session = begun(model, prompts)
        got = sweep_batch(session, prompts, OPTIONS)
        assert got is not None
        assert max(differences(got, sweep_prompts(session, prompts, OPTIONS, quiet)).values()) < 1e-11


def test_sampled_entries_and_heads_that_do_not_all_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where W' is too large to look at every entry, and where a prompt's zero token leaves blocks of its own empty."""
    monkeypatch.setattr("duat_cli.analysis.inspect.measured.entries.EXACT_ENTRIES", 0)
    model = two_single("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = 0.0
    prompts = prompts_of(model, 5, 7)
    prompts[2] = prompt_of(torch.tensor([[11, 12, 13, 14, 15, 16, 17]]))
    session = begun(model, prompts[:2])
    got = sweep_batch(session, prompts, OPTIONS)
    assert got is not None
    worst = differences(got, sweep_prompts(session, prompts, OPTIONS, quiet))
    assert max(error for path, error in worst.items() if "numerical" not in path) < 2e-5
    assert max(error for path, error in worst.items() if "numerical" in path) < 2e-3  # a draw next to the threshold


@pytest.mark.parametrize("model_type", ONE_BY_ONE)
def test_a_model_that_takes_prompts_one_by_one_gets_them_so(model_type: str) -> None:
    model = single_model(model_type) if model_type in WHOLE else two_single(model_type)
    session = begun(model, prompts_of(model, 1, 7))
    assert sizes(session, OPTIONS, 10_000)(7) == 1
    assert sweep_batch(session, prompts_of(model, 3, 7), OPTIONS) is None


class Averaging(nn.Module):
    """Embeddings of which each prompt gets a little of those of the others in its batch."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.own(ids)
        return 0.9 * x + 0.1 * x.mean(dim=0, keepdim=True)


def test_a_model_whose_prompts_reach_each_other_is_seen() -> None:
    """Its batches are exact sums of what the batch computes, but each prompt alone is another."""
    model = two_single("llama")
    prompts = prompts_of(model, 3, 7)
    session = begun(model, prompts)
    assert sizes(session, OPTIONS, 10_000)(7) > 1
    model.model.embed_tokens = Averaging(model.model.embed_tokens)
    assert sweep_batch(session, prompts, OPTIONS) is not None
    assert sizes(session, OPTIONS, 10_000)(7) == 1


@pytest.mark.parametrize("asked", ["terms", "end_to_end", "routing", "spectrum"])
def test_what_is_asked_beside_the_numbers_runs_one_by_one(asked: str, session: Session) -> None:
    assert sizes(session, InspectOptions(**{asked: True}), 10_000)(7) == 1


# -- which go together -------------------------------------------------------------------------------------------


def test_few_prompts_run_one_by_one(session: Session) -> None:
    assert sizes(session, OPTIONS, 2 * budgets.FEWEST_BATCHES - 1)(7) == 1
    assert sizes(session, OPTIONS, 2 * budgets.FEWEST_BATCHES)(7) == 2
    assert sizes(session, OPTIONS, 10**6)(7) > sizes(session, OPTIONS, 10**6)(70) >= 1
    assert sizes(session, OPTIONS, 10**6)(10**6) == 1


def test_a_gpu_takes_as_many_as_its_share_of_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    session = begun(model, prompts_of(model, 1, 7))
    few = sizes(session, OPTIONS, 10**6)(70)
    monkeypatch.setattr(module, "_agree", lambda *_: True)  # asked of the device, which is not here
    session.loaded = replace(session.loaded, device="cuda:0")
    many = sizes(session, OPTIONS, 10**6)(70)
    each = budgets.batched_bytes(70, session.structure.hidden_size, session.heads, 4)
    assert few < many == min(10**6 // budgets.FEWEST_BATCHES, budgets.BATCH_BYTES_GPU // each)
    monkeypatch.setattr(module, "BATCH_BYTES_GPU", each - 1)
    assert sizes(session, OPTIONS, 10**6)(70) == 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 20))
def test_a_batch_holds_prompts_of_as_many_tokens_from_one_slice(counts: list[int], most: int, together: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE", together)
        leading = leaders(counts, lambda tokens: min(most, tokens))
    assert leading[0] == 0
    assert leading.count(0) == 1
    members: dict[int, list[int]] = {}
    for position, leader in enumerate(leading):
        members.setdefault(leader, []).append(position)
    for leader, batch in members.items():
        assert batch[0] == leader
        assert {counts[k] for k in batch} == {counts[leader]}
        assert {k // together for k in batch} == {leader // together}
        assert len(batch) <= min(most, counts[leader])
    open_ones = [(counts[k], k // together) for k, batch in members.items() if k and len(batch) < min(most, counts[k])]
    assert len(open_ones) == len(set(open_ones))  # none is begun while another still has room
    assert batches(leading) == [*members.values()]
    behind = [[position for position in batch if position > 1] for batch in members.values()]
    assert sorted(batches(leading, 2)) == sorted(batch for batch in behind if batch)


# -- a whole report ----------------------------------------------------------------------------------------------


@pytest.fixture
def lots(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Prompt]]:
    """Prompts that are enough for batches of three."""
    monkeypatch.setattr(budgets, "FEWEST_BATCHES", 4)
    return lambda model: [prompt for tokens in (5, 6, 5) for prompt in prompts_of(model, 4, tokens)]


def test_a_report_in_batches_is_that_of_one_by_one(
    lots: Callable[[Any], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_single("llama")
    prompts = lots(model)
    together: list[int] = []
    own = sweep_module.sweep_batch

    def counted(session: Session, batch: list[Prompt], options: Any) -> Any:
        together.append(len(batch))
        return own(session, batch, options)

    monkeypatch.setattr(sweep_module, "sweep_batch", counted)
    got = inspect(as_loaded(model), prompts, InspectOptions(cache=False, per_prompt=True), quiet)
    monkeypatch.setattr(module, "_agree", lambda *_: False)
    expected = inspect(as_loaded(model), prompts, InspectOptions(cache=False, per_prompt=True), quiet)
    assert together == [3, 3, 3]  # of 5, 6 and 5 tokens; the first prompt is alone, and so is what is left of each
    assert (got.environment.batch_size, expected.environment.batch_size) == (3, 1)
    assert got.certificate.plain_error == expected.certificate.plain_error  # of the first prompt
    for block, other in zip(got.blocks, expected.blocks, strict=True):
        assert block.prompts is not None
        assert [row.prompt for row in block.prompts] == list(range(len(prompts)))
        assert block.operator.frobenius_norm == pytest.approx(other.operator.frobenius_norm, rel=1e-5)
        assert block.coupling.entropy_bits == pytest.approx(other.coupling.entropy_bits, abs=1e-5)
        assert block.null.uniform is not None


def test_a_batch_that_fails_is_run_one_by_one(
    lots: Callable[[Any], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_single("llama")
    prompts = lots(model)
    expected = inspect(as_loaded(model), prompts, OPTIONS, quiet)
    own = sweep_module.measure_each
    monkeypatch.setattr(
        sweep_module,
        "measure_each",
        lambda each, *rest, **more: own(each, *rest, **more) if len(each.values) < 3 else 1 / 0,
    )
    monkeypatch.setattr(sweep_module, "FAULTS", (*sweep_module.FAULTS, ZeroDivisionError))
    monkeypatch.setattr(module, "PROBES", (2, 7))
    got = inspect(as_loaded(model), prompts, OPTIONS, quiet)
    assert got.environment.batch_size == 3
    assert [b.operator.frobenius_norm for b in got.blocks] == pytest.approx(
        [b.operator.frobenius_norm for b in expected.blocks], rel=1e-5
    )


# -- several processes -------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize("mapped", [0, 2])
def test_processes_that_share_the_prompts_find_the_same(lots: Callable[[Any], list[Prompt]], mapped: int) -> None:
    """Batches, prompts alone, maps and both nulls; what runs here is the first prompt, or those that are mapped."""
    loaded = as_loaded(two_single("llama"))
    prompts = lots(loaded.model)
    options = InspectOptions(cache=False, null="all", per_prompt=True)

    def report(processes: int) -> tuple[InspectReport, list[str]]:
        said: list[str] = []
        maps = Maps(prompts[:mapped], str) if mapped else None
        found = inspect(
            replace(loaded, processes=processes), prompts, options, lambda *at: said.append(at[2]), Filled(maps=maps)
        )
        return found, said

    (alone, heard), (shared, said) = report(1), report(2)
    assert shared == alone.model_copy(update={"run": shared.run})
    assert len(alone.maps or ()) == mapped
    assert heard[-1] == "prompt 12 of 12"
    assert {text for text in said if text.startswith("prompt")} <= {f"prompt {k + 1} of 12" for k in range(12)}
    assert len(said) < len(heard)  # theirs come several times a second at most


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_what_goes_wrong_in_a_process_is_that_of_the_first_prompt(
    lots: Callable[[Any], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = replace(as_loaded(two_single("llama")), processes=2)
    prompts = lots(loaded.model)
    places, own = {id(prompt): place for place, prompt in enumerate(prompts)}, sweep_module.sweep_prompts

    def failing(session: Session, few: list[Prompt], *rest: Any, **more: Any) -> list[PromptSweep]:
        if (place := places[id(few[0])]) in (4, 8):
            raise UnsupportedModelError(f"prompt {place}")
        return own(session, few, *rest, **more)

    monkeypatch.setattr(budgets, "FEWEST_BATCHES", 64)
    monkeypatch.setattr(sweep_module, "sweep_prompts", failing)
    with pytest.raises(UnsupportedModelError, match="prompt 4"):
        inspect(loaded, prompts, OPTIONS, quiet)
