"""What heads read: against loops over the attention weights that transformers returns, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import InDouble, as_loaded, double_model, prompt_of, quiet, row_budget_of, two_single
from image_models import build, picture
from paging import in_parts, two_saved, whole
from torch import Tensor

from duat_cli.analysis.inspect.heads import (
    NAMES,
    NO_H,
    NO_TOKENS,
    NOT_REPEATED,
    OF_REPEATED,
    OTHER_VECTORS,
    WINDOWS,
    ZERO_ROWS,
    measured_heads,
    tokens_of,
)
from duat_cli.analysis.inspect.heads import heads as heads_under
from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.sweep import sweep_batch, sweep_prompts
from duat_cli.analysis.prepared import Prepared, as_prompts
from duat_cli.analysis.session import Session
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.modality import STATES, decoder_of
from duat_cli.models.instrument.windows import Windows
from duat_cli.results.heads import Attended, Heads

OPTIONS = InspectOptions(cache=False, heads=True)
IDS = torch.tensor([[41, 52, 63, 41, 52, 74, 41, 41, 60]])
ROW_BUDGET = 600  # bytes of H kept whole; above it rows are recomputed


def heads_of(model: Any, *ids: Tensor, options: InspectOptions = OPTIONS) -> list[Heads]:
    return told(inspect(as_loaded(model), [prompt_of(one) for one in ids], options, quiet))


def told(report: Any) -> list[Heads]:
    found = [block.heads for block in report.blocks]
    assert None not in found
    return found


@torch.no_grad()
def attentions(model: Any, ids: Tensor) -> list[np.ndarray]:
    """H of every block, (heads, N, N)."""
    model.set_attn_implementation("eager")
    return [weights[0].double().numpy() for weights in model(input_ids=ids, output_attentions=True).attentions]


def naive(H: np.ndarray, seen: np.ndarray, t: Sequence[int] | None) -> dict[str, float | None]:
    """The numbers of one head by loops over its H (N, N)."""
    count = len(H)
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for i in range(count):
        size = sum(abs(H[i, j]) for j in range(count))
        if size == 0:
            continue
        p = [abs(H[i, j]) / size for j in range(count)]
        entropy = -sum(x * math.log2(x) for x in p if x > 0)
        found["entropy_bits"].append(entropy)
        found["effective_context"].append(2**entropy)
        found["mean_distance"].append(sum(x * abs(i - j) for j, x in enumerate(p)))
        if i > 0:
            found["first_token_share"].append(p[0])
            found["current_token_share"].append(p[i])
            found["previous_token_share"].append(p[i - 1])
        if t is None:
            continue
        equal = [j for j in range(i) if t[j] == t[i]]
        behind = [j for j in range(1, count) if t[j - 1] == t[i] and j - 1 != i]
        for name, places in (("duplicate_token_share", equal), ("induction_share", behind)):
            if any(seen[i, j] for j in places):
                found[name].append(sum(p[j] for j in places))
    return {name: sum(values) / len(values) if values else None for name, values in found.items()}


def numbers(found: Attended) -> dict[str, float | None]:
    return {name: getattr(found, name) for name in NAMES}


def assert_same(got: Mapping[str, float | None], expected: Mapping[str, float | None], tolerance: float = 1e-9) -> None:
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert got[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize(
    ("model_type", "rows"),
    [
        *((name, None) for name in ("llama", "gpt2", "bert", "gemma2", "gemma3_text", "gpt_oss", "mixtral")),
        *((name, ROW_BUDGET) for name in ("bert", "gemma2", "gpt_oss")),
    ],
)
def test_numbers_are_those_of_the_attention_that_the_model_returns(model_type: str, rows: int | None) -> None:
    """Grouped heads, a window, sinks in the softmax, no mask of causality; H whole and by rows."""
    model = double_model(model_type)
    with InDouble():
        with row_budget_of(rows):
            found = heads_of(model, IDS)
        dense = attentions(model, IDS)
    assert len(found) == len(dense)
    causal, t = model_type != "bert", IDS[0].tolist()
    for heads, H in zip(found, dense, strict=True):
        seen: np.ndarray = np.any(H > 0, axis=0)
        assert not np.triu(seen, 1).any() or not causal
        assert heads.each is not None
        assert heads.uniform is not None
        assert [head.index for head in heads.each] == list(range(len(H)))
        for head, own in zip(heads.each, H, strict=True):
            assert_same(numbers(head), naive(own, seen, t))
            assert head.row_sum == pytest.approx(own.sum() / len(own), rel=1e-9)
            assert (head.row_sum < 0.999) == (model_type == "gpt_oss")
            assert head.reasons == {}
        assert_same(numbers(heads.uniform), naive(seen / seen.sum(axis=1, keepdims=True), seen, t))


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_of_a_decoder_by_its_own_tokens(model_type: str) -> None:
    model, ids = two_single(model_type), torch.tensor([[0, 45, 56, 45, 56, 45]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        given = {"input_ids": ids, STATES: model.get_encoder()(input_ids=IDS)[0]}
        dense = model.get_decoder()(**given, use_cache=False, output_attentions=True).attentions
    loaded = replace(as_loaded(model), model=decoder_of(model), pair=model, stack="decoder", like=given)
    found = told(inspect(loaded, [replace(prompt_of(ids), prepared=given)], OPTIONS, quiet))
    for heads, H in zip(found, dense, strict=True):
        assert (heads.duplicate_rows, heads.induction_rows) == (3, 3)
        for head, own in zip(heads.each or (), H[0].double().numpy(), strict=True):
            assert_same(numbers(head), naive(own, np.tri(6, dtype=bool), ids[0].tolist()), 1e-5)


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_of_a_picture_by_its_patches(name: str) -> None:
    """Of windows as well, whose H is laid out over the tokens of the block."""
    loaded = replace(as_loaded(build(name).eval()), like=picture())
    found = told(inspect(loaded, as_prompts(loaded, [Prepared("one", picture(), None)]), OPTIONS, quiet))
    merging = [heads for heads in found if heads.each is None]
    assert len(merging) == (1 if name == "swin" else 0)  # a block that makes one token of four has no attention
    assert all(heads == Heads.absent(NO_H) for heads in merging)
    for heads in found:
        for head in heads.each or ():
            assert head.reasons == dict.fromkeys(OF_REPEATED, NO_TOKENS)
            assert 0 < head.row_sum < 1 + 1e-5  # padding of windows takes a part
    if name == "vit":
        loaded.model.set_attn_implementation("eager")
        with torch.no_grad():
            dense = loaded.model(**picture(), output_attentions=True).attentions
        for heads, H in zip(found, dense, strict=True):
            for head, own in zip(heads.each or (), H[0].double().numpy(), strict=True):
                assert_same(numbers(head), naive(own, own > 0, None), 1e-5)


def test_how_many_rows_have_a_repeated_token() -> None:
    """Rows 3, 4, 6 and 7 have their token in front of them, and see what came behind it."""
    for heads in heads_of(two_single("llama"), IDS):
        assert (heads.duplicate_rows, heads.induction_rows) == (4, 4)
    for heads in heads_of(two_single("bert"), IDS):  # what stands behind a later occurrence is seen as well
        assert (heads.duplicate_rows, heads.induction_rows) == (4, 6)


def test_attention_that_is_uniform_equals_its_null() -> None:
    model = two_single("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    for heads in heads_of(model, IDS):
        assert heads.each is not None
        assert heads.uniform is not None
        for head in heads.each:
            assert_same(numbers(head), numbers(heads.uniform), 1e-6)


def planted(*places: Sequence[int]) -> Tensor:
    """H that looks at one place a row, a head each."""
    H = torch.zeros(len(places), len(places[0]), len(places[0]))
    for head, row in enumerate(places):
        for i, j in enumerate(row):
            H[head, i, j] = 1.0
    return H


def test_perfect_heads_have_exactly_one() -> None:
    t = torch.tensor([5, 6, 7, 8, 5, 6, 7, 8])
    first, own, back = [0] * 8, list(range(8)), [0, *range(7)]
    H = planted(first, own, back, [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 2, 3, 4])
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    found, uniform = measured_heads([(slice(0, 8), H)], causal, t)
    perfect = ("first_token_share", "current_token_share", "previous_token_share", *OF_REPEATED)
    for head, name in enumerate(perfect):
        assert found.values[name][head] == 1.0
        assert found.values["effective_context"][head] == 1.0
        assert found.values["entropy_bits"][head] == 0.0
    assert found.values["mean_distance"] == [3.5, 0.0, 7 / 8, 2.0, (1 + 2 + 3 + 3 * 4) / 8]
    assert found.rows == dict.fromkeys(OF_REPEATED, 4)
    assert uniform.values["induction_share"] == [pytest.approx((1 / 5 + 1 / 6 + 1 / 7 + 1 / 8) / 4, rel=1e-12)]
    moved, _ = measured_heads([(slice(0, 8), H)], causal, torch.arange(8))  # a check that can fail
    assert all(math.isnan(value) for value in moved.values["induction_share"])


def test_signs_sizes_and_rows_of_zeros() -> None:
    """Of |H|, whatever a row sums to; rows of zeros count nowhere, and a head of zeros has no numbers."""
    H = torch.randn(3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).tril()
    H[0, 2], H[1] = 0.0, H[1] * 1e-200
    H[2] = 0.0
    t = [3, 3, 4, 3, 4, 5]
    pieces = [(slice(0, 2), H[:, :2]), (slice(2, 6), H[:, 2:])]
    found, uniform = measured_heads(pieces, None, torch.tensor(t))
    seen = (H != 0).any(dim=0).numpy()
    for head in range(2):
        assert_same({name: found.values[name][head] for name in NAMES}, naive(H[head].numpy(), seen, t))
    assert all(math.isnan(values[2]) for values in found.values.values())
    assert found.row_sums == pytest.approx((H.sum(dim=(1, 2)) / 6).tolist())
    even = {name: uniform.values[name][0] for name in NAMES}
    assert_same(even, naive(seen / seen.sum(axis=1, keepdims=True), seen, t))


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "diffllama"])
def test_of_mixers_and_differences_by_the_size_of_h(model_type: str) -> None:
    for heads in heads_of(two_single(model_type), IDS):
        if heads.each is None:
            assert heads.reasons["each"]
            continue
        assert heads.uniform is not None
        for head in heads.each:
            assert head.effective_context is None or 1 <= head.effective_context <= IDS.shape[1] + 1e-5


# -- what is not defined ---------------------------------------------------------------------------------------


def test_without_a_repeated_token_and_of_one_token() -> None:
    model = two_single("llama")
    for heads in heads_of(model, torch.arange(40, 46)[None]):
        assert (heads.duplicate_rows, heads.induction_rows) == (0, 0)
        for one in (*(heads.each or ()), heads.uniform):
            assert one is not None
            assert one.reasons == NOT_REPEATED
            assert (one.duplicate_token_share, one.induction_share) == (None, None)
    for heads in heads_of(model, torch.tensor([[40]])):
        assert heads.uniform is not None
        assert heads.uniform.first_token_share is None
        assert heads.uniform.reasons["first_token_share"] == "needs a second token"
        assert heads.uniform.effective_context == 1.0


def test_positions_that_are_no_tokens() -> None:
    """Pictures and sounds have counted positions; a piece of a picture in a text is equal to no other piece."""
    counted = Prompt("picture", "0", torch.arange(4)[None], 1, prepared={"pixel_values": torch.zeros(1, 3, 2, 2)})
    assert tokens_of(counted) is None
    assert tokens_of(replace(counted, prepared={"input_ids": torch.tensor([[7, 7, 7, 7]])})) is None
    ids = torch.tensor([[9, 8, 8, 9]])
    found = tokens_of(Prompt("text", "0", ids, 1, prepared={"input_ids": ids}, pieces={1: "image", 2: "video"}))
    assert found is not None
    assert found.tolist() == [9, -2, -3, 9]
    assert ids.tolist() == [[9, 8, 8, 9]]


def test_of_other_positions_the_numbers_by_token_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duat_cli.analysis.inspect.sweep.tokens_of", lambda prompt: None)
    for heads in heads_of(two_single("llama"), IDS):
        assert heads.reasons == dict.fromkeys(("duplicate_rows", "induction_rows"), NO_TOKENS)
        for head in heads.each or ():
            assert head.reasons == dict.fromkeys(OF_REPEATED, NO_TOKENS)
            assert head.previous_token_share is not None


def test_blocks_without_one_h_over_their_tokens_say_why() -> None:
    call = SimpleNamespace(rows=SimpleNamespace(tokens=9), value=torch.zeros(1, 2, 9, 4), windows=None)
    changed: list[tuple[dict[str, Any], str]] = [
        ({"windows": Windows(3)}, WINDOWS),
        ({"rows": SimpleNamespace(tokens=3)}, OTHER_VECTORS),
        ({"value": torch.zeros(1, 2, 12, 4)}, OTHER_VECTORS),
    ]
    for calls, why in (
        ([], NO_H),
        ([call, call], "it calls attention 2 times; heads are read of one call"),
        *(([SimpleNamespace(**vars(call) | new)], why) for new, why in changed),
    ):
        run: Any = SimpleNamespace(attention=calls, input=torch.zeros(1, 9, 8), prompts=1)
        [found] = heads_under(run, [IDS[0]])
        assert found == Heads.absent(why)


def test_a_head_of_zeros_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_single("llama")
    original = measured_heads

    def silenced(chunks: Any, allowed: Any, tokens: Any) -> Any:
        laid = [(rows, weights.clone()) for rows, weights in chunks]
        for _, weights in laid:
            weights[1] = 0.0
        return original(laid, allowed, tokens)

    monkeypatch.setattr("duat_cli.analysis.inspect.heads.measured_heads", silenced)
    for heads in heads_of(model, IDS):
        assert heads.each is not None
        assert heads.each[1].reasons["entropy_bits"] == ZERO_ROWS
        assert heads.each[1].row_sum == 0.0
        assert heads.each[0].reasons == {}


# -- every way of running --------------------------------------------------------------------------------------


def test_it_is_asked_for() -> None:
    report = inspect(as_loaded(two_single("llama")), [prompt_of(IDS)], replace(OPTIONS, heads=False), quiet)
    assert all(block.heads is None for block in report.blocks)


def test_means_over_prompts() -> None:
    """Of each number over the prompts; of repeated tokens over those that have any, whose rows are added up."""
    model, texts = two_single("llama"), [IDS, torch.arange(40, 46)[None], torch.tensor([[41, 42, 41, 42, 43]])]
    alone = [heads_of(model, ids) for ids in texts]
    for number, heads in enumerate(heads_of(model, *texts)):
        mine = [one[number] for one in alone]
        assert (heads.duplicate_rows, heads.induction_rows) == (4 + 0 + 2, 4 + 0 + 2)
        assert heads.uniform is not None
        assert heads.each is not None
        groups: list[tuple[Any, list[Any]]] = [(heads.uniform, [one.uniform for one in mine])]
        groups += [(head, [(one.each or [])[head.index] for one in mine]) for head in heads.each]
        for mean, parts in groups:
            assert mean.reasons == {}
            for name in NAMES:
                known = [value for part in parts if (value := getattr(part, name)) is not None]
                assert len(known) == (2 if name in OF_REPEATED else 3)
                assert getattr(mean, name) == pytest.approx(sum(known) / len(known), rel=1e-12)


def test_per_prompt() -> None:
    options = replace(OPTIONS, per_prompt=True)
    report = inspect(as_loaded(two_single("llama")), [prompt_of(IDS), prompt_of(IDS[:, :5])], options, quiet)
    for block in report.blocks:
        assert block.prompts is not None
        assert [row.heads.induction_rows for row in block.prompts if row.heads] == [4, 2]


@pytest.mark.parametrize("model_type", ["llama", "bert", "gemma2", "gpt_oss"])
def test_a_batch_gives_each_prompt_its_own_numbers(model_type: str) -> None:
    model = two_single(model_type)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(10, min(rows, 14), (4, 7), generator=torch.Generator().manual_seed(3))
    prompts = [prompt_of(one[None]) for one in ids]
    session = Session(as_loaded(model), quiet, cache=False)
    expected = sweep_prompts(session, prompts, OPTIONS, quiet)
    got = sweep_batch(session, prompts, OPTIONS)
    assert got is not None
    for one, other in zip(got, expected, strict=True):
        for index, block in one.blocks.items():
            mine, theirs = block.heads, other.blocks[index].heads
            assert mine is not None
            assert theirs is not None
            assert (mine.duplicate_rows, mine.induction_rows) == (theirs.duplicate_rows, theirs.induction_rows)
            assert mine.uniform == theirs.uniform
            for head, same in zip(mine.each or (), theirs.each or (), strict=True):
                assert_same(numbers(head), numbers(same), 2e-5)
                assert head.reasons == same.reasons


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_read_block_by_block_it_is_the_same(model_type: str, tmp_path: Path) -> None:
    folder, prompts = two_saved(model_type, tmp_path), [prompt_of(IDS), prompt_of(IDS[:, 2:])]
    resident = told(inspect(whole(folder), prompts, OPTIONS, quiet))
    with in_parts(folder) as loaded:
        streamed = told(inspect(loaded, prompts, OPTIONS, quiet))
    assert streamed == resident
