"""What moves the prediction, against plain hooks in the model's own pass."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_reports as sample
import torch
from classifiers import classifier
from function_modes import SOFTMAX, Kept
from helpers import as_loaded, prompt_of, quiet, single_model, token_ids, two_deep, two_single
from paging import in_parts, two_saved, whole
from rich.console import Console
from torch import Tensor

from duat_cli.analysis.compare import captured, patching
from duat_cli.analysis.compare.patching import NO_THIRD, Patcher, Target, third_texts
from duat_cli.analysis.session import Session
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.kinds import Patched
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.report.html.compare.patching import patches as picture_of
from duat_cli.report.tables.page import Page
from duat_cli.report.tables.patching import patches, predictions
from duat_cli.results.compare.patching import PatchedPair, PatchEffect, Patching
from duat_cli.statistics.divergence import kl
from duat_cli.zoo import tiny

TOKENS = 7
PAIRS = [(0, 1), (0, 2)]


def found_of(
    loaded: LoadedModel,
    what: Patched,
    pairs: Sequence[tuple[int, int]] = PAIRS,
    prompts: Sequence[Prompt] | None = None,
    layers: frozenset[int] | None = None,
    answers: Sequence[tuple[int, int]] | None = None,
) -> Patching:
    session = Session(loaded, quiet, cache=False)
    given = [prompt_of(ids_of(loaded.model, seed)) for seed in range(3)] if prompts is None else prompts
    return Patcher(session, given, pairs, what, layers, quiet, answers).report(str, [str(n) for n in range(TOKENS)])


def ids_of(model: Any, seed: int) -> Tensor:
    return token_ids(model, TOKENS, seed)


@pytest.fixture(scope="module")
def llama() -> Any:
    model = two_single("llama")
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def found(llama: Any) -> Callable[[Patched], Patching]:
    """What is found of the model's pairs: made once, and only read."""
    return functools.cache(lambda what: found_of(as_loaded(llama), what))


Hook = Callable[..., Any]


@contextmanager
def hooks(model: Any, given: Sequence[tuple[str, str, Hook]]) -> Iterator[None]:
    """given: name of a module, 'before' or 'after', and the hook."""
    with ExitStack() as stack:
        for name, when, hook in given:
            module = model.get_submodule(name)
            before = functools.partial(module.register_forward_pre_hook, with_kwargs=True)
            handle = before(hook) if when == "before" else module.register_forward_hook(hook)
            stack.callback(handle.remove)
        yield


def logits_of(model: Any, ids: Tensor, given: Sequence[tuple[str, str, Hook]] = ()) -> Tensor:
    with torch.no_grad(), hooks(model, given):
        found: Tensor = model(input_ids=ids).logits.flatten(0, -2)[-1]  # of the last token, or of a text
    return found


def expected(
    model: Any,
    run: Callable[[int, int], Tensor],
    pairs: Sequence[tuple[int, int]] = PAIRS,
    answers: Sequence[tuple[int, int]] | None = None,
) -> list[float]:
    """effect, null and kl from the logits `run(a, source)` of a's pass with a part of the source's."""
    plain = [logits_of(model, ids_of(model, seed)).double() for seed in range(3)]
    size, moved, null, before, after = 0.0, 0.0, 0.0, 0.0, 0.0
    for number, (a, b) in enumerate(pairs):
        rise = plain[b].softmax(0) - plain[a].softmax(0)
        down, up = (int(rise.argmin()), int(rise.argmax())) if answers is None else answers[number]

        def apart(logits: Tensor, up: int = up, down: int = down) -> float:
            return float(logits[up].double() - logits[down].double())

        third = pairs[(number + 1) % len(pairs)][1]  # where no text is given twice
        size += apart(plain[b]) - apart(plain[a])
        moved += apart(run(a, b)) - apart(plain[a])
        null += apart(run(a, third)) - apart(plain[a])
        before += float(kl(plain[b][None], plain[a][None]))
        after += float(kl(plain[b][None], run(a, b)[None]))
    return [moved / size, null / size, 1 - after / before]


def numbers(effect: PatchEffect | None) -> list[float | None]:
    assert effect is not None
    return [effect.effect, effect.null, effect.kl]


def kept(model: Any, seed: int, name: str) -> Tensor:
    """What a module gives under one prompt."""
    found: list[Tensor] = []
    logits_of(model, ids_of(model, seed), [(name, "after", lambda module, args, output: found.append(output))])
    return found[0]


def told(model: Any, name: str, source: int) -> tuple[str, str, Hook]:
    """A hook by which a module gives what it gives under another prompt."""
    given = kept(model, source, name)
    return name, "after", lambda module, args, output: given


def test_a_tokens_stream_is_put_in_front_of_a_block(llama: Any, found: Callable[[Patched], Patching]) -> None:
    def run(token: int, a: int, source: int) -> Tensor:
        stream: list[Tensor] = []
        see = ("model.layers.1", "before", lambda module, args, kwargs: stream.append(args[0]))
        logits_of(llama, ids_of(llama, source), [see])

        def put(module: Any, args: Any, kwargs: Any) -> Any:
            hidden = args[0].clone()
            hidden[:, token] = stream[0][:, token]
            return (hidden, *args[1:]), kwargs

        return logits_of(llama, ids_of(llama, a), [("model.layers.1", "before", put)])

    tokens = found("tokens")
    assert tokens.holds
    assert [one.token for one in tokens.blocks[1].tokens] == list(range(TOKENS))
    for token in (0, TOKENS - 1):
        wanted = expected(llama, functools.partial(run, token))
        assert numbers(tokens.blocks[1].tokens[token]) == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_tokens_that_are_asked_for_are_followed(llama: Any, found: Callable[[Patched], Patching]) -> None:
    answers = [(3, 9), (9, 4)]
    asked = found_of(as_loaded(llama), "heads", answers=answers)
    assert [(pair.token_a, pair.token_b, pair.given) for pair in asked.pairs] == [("3", "9", True), ("9", "4", True)]
    one_head = expected(llama, functools.partial(with_softmax, llama, 1, 2), answers=answers)
    assert numbers(asked.blocks[1].heads[2]) == pytest.approx(one_head, rel=1e-4, abs=1e-6)
    assert predictions(asked)[0].startswith("a, prompt 0, to b, prompt 1: the logit of '9' less that of '3' is ")
    assert found("heads").blocks[1].heads[2].kl == asked.blocks[1].heads[2].kl
    falling = [pair for pair in asked.pairs if (pair.after or 0.0) < (pair.before or 0.0)]
    both = asked.model_copy(update={"pairs": [*falling, *(back(pair) for pair in falling)]})
    assert predictions(both)[-1] == f"the difference falls from a to b in {len(falling)} of {2 * len(falling)} pairs"
    with pytest.raises(InputError, match="token 5000 is none of the"):
        found_of(as_loaded(llama), "heads", answers=[(3, 5000)] * 2)


@pytest.mark.parametrize("kind", ["text", "last"])
def test_the_class_of_a_text_is_followed(kind: str) -> None:
    model = classifier(kind)
    mlp = "model.layers.1.mlp" if kind == "last" else "bert.encoder.layer.1.output.dense"
    found = found_of(as_loaded(model), "blocks")
    assert found.holds

    def with_ffn(a: int, source: int) -> Tensor:
        return logits_of(model, ids_of(model, a), [told(model, mlp, source)])

    assert numbers(found.blocks[1].ffn) == pytest.approx(expected(model, with_ffn), rel=1e-3, abs=1e-5)
    asked = found_of(as_loaded(model), "blocks", answers=[(0, 2), (1, 2)])
    assert [(pair.token_a, pair.token_b) for pair in asked.pairs] == [("0", "2"), ("1", "2")]
    followed = expected(model, with_ffn, answers=[(0, 2), (1, 2)])
    assert numbers(asked.blocks[1].ffn) == pytest.approx(followed, rel=1e-3, abs=1e-5)


def test_the_class_of_a_token_is_not() -> None:
    with pytest.raises(UnsupportedModelError, match="the class of a token, so there is no one prediction to move"):
        found_of(as_loaded(classifier("token")), "blocks")


def back(pair: PatchedPair) -> PatchedPair:
    """The same from b to a."""
    return pair.model_copy(update={"before": pair.after, "after": pair.before})


def test_a_difference_that_only_rounding_moves_has_no_share(llama: Any) -> None:
    """Prompts whose logits differ, and two tokens whose logits differ as much behind one as behind the other."""
    model = copy.deepcopy(llama)
    with torch.no_grad():
        model.lm_head.weight[9] = model.lm_head.weight[3]
    found = found_of(as_loaded(model), "heads", answers=[(3, 9)] * 2)
    head = found.blocks[1].heads[2]
    assert (head.effect, head.null) == (None, None)
    assert head.kl is not None
    assert head.reasons == {"effect": patching.SAME, "null": patching.SAME}


def with_softmax(model: Any, block: int, head: int | None, a: int, source: int) -> Tensor:
    """a's logits where the softmax of one block, or one head of it, gives what it gives under another prompt."""
    weights = []
    for seed in (a, source):
        with torch.no_grad(), Kept(SOFTMAX) as mode:
            model(input_ids=ids_of(model, seed))
        weights.append(mode.values)

    given = weights[0][: block + 1]  # behind it the model's own softmax runs
    chosen = slice(None) if head is None else slice(head, head + 1)
    given[block] = given[block].clone()
    given[block][:, chosen] = weights[1][block][:, chosen]
    with torch.no_grad(), Kept(SOFTMAX, given):
        found: Tensor = model(input_ids=ids_of(model, a)).logits[0, -1]
    return found


def test_attention_weights_of_a_block_and_of_a_head(llama: Any, found: Callable[[Patched], Patching]) -> None:
    blocks, heads = found("blocks"), found("heads")
    assert blocks.holds
    assert heads.holds
    whole_block = expected(llama, functools.partial(with_softmax, llama, 1, None))
    assert numbers(blocks.blocks[1].H) == pytest.approx(whole_block, rel=1e-4, abs=1e-6)
    one_head = expected(llama, functools.partial(with_softmax, llama, 1, 2))
    assert numbers(heads.blocks[1].heads[2]) == pytest.approx(one_head, rel=1e-4, abs=1e-6)
    assert [len(block.heads) for block in heads.blocks] == [4, 4]


def test_ffns_and_norms_of_a_block_and_of_all(llama: Any, found: Callable[[Patched], Patching]) -> None:
    blocks = found("blocks")
    mlp = "model.layers.{}.mlp"

    def with_ffn(numbers: Sequence[int], a: int, source: int) -> Tensor:
        return logits_of(llama, ids_of(llama, a), [told(llama, mlp.format(number), source) for number in numbers])

    for effect, those in ((blocks.blocks[0].ffn, [0]), (blocks.whole and blocks.whole.ffn, [0, 1])):
        wanted = expected(llama, functools.partial(with_ffn, those))
        assert numbers(effect) == pytest.approx(wanted, rel=1e-4, abs=1e-6)

    def scales(norm: str, seed: int) -> Tensor:
        inputs: list[Tensor] = []
        logits_of(llama, ids_of(llama, seed), [(norm, "before", lambda module, args, kwargs: inputs.append(args[0]))])
        return torch.rsqrt(inputs[0].square().mean(-1, keepdim=True) + llama.get_submodule(norm).variance_epsilon)

    def with_norms(a: int, source: int) -> Tensor:
        given = []
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = f"model.layers.1.{name}"
            scale, weight = scales(norm, source), llama.get_submodule(norm).weight

            def held(module: Any, args: Any, output: Any, scale: Tensor = scale, weight: Tensor = weight) -> Tensor:
                return args[0] * scale * weight

            given.append((norm, "after", held))
        return logits_of(llama, ids_of(llama, a), given)

    assert numbers(blocks.blocks[1].norms) == pytest.approx(expected(llama, with_norms), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "bloom", "minimax", "granitemoehybrid"])
def test_own_parts_give_back_the_own_logits(model_type: str) -> None:
    """Parallel blocks, experts, an attention function of its own, mixers without softmax."""
    model = two_deep(tiny.tiny_model(model_type))
    session, prompts = Session(as_loaded(model), quiet, cache=False), [prompt_of(ids_of(model, s)) for s in range(2)]
    kinds: tuple[Patched, ...] = ("blocks", "heads", "tokens")
    for what in kinds:
        patcher = Patcher(session, prompts, PAIRS[:1], what, frozenset([1]), quiet)
        found = patcher.report(str, [str(n) for n in range(TOKENS)])
        assert found.own_error < 1e-5
        assert [block.index for block in found.blocks] == [1]
    last = found.blocks[0].tokens[-1]
    assert 0.1 < (last.effect or 0.0) < 1.5
    assert last.reasons == {"null": NO_THIRD}


def test_a_block_without_attention_weights_says_so() -> None:
    model, totals = tiny.tiny_model("mamba"), set[int]()
    session = Session(as_loaded(model), quiet, cache=False)
    prompts = [prompt_of(ids_of(model, seed)) for seed in range(2)]

    def progress(_done: int, total: int, what: str) -> None:
        totals.update([total] if what == "patches" else [])

    found = Patcher(session, prompts, PAIRS[:1], "blocks", frozenset([1]), progress).report(str, [])
    assert totals == {2 * 3}  # the block's and all blocks': no pass for an FFN that is not there
    [block] = found.blocks
    assert block.ffn is not None
    assert set(block.ffn.reasons.values()) == {"it has no FFN"}
    assert block.together is not None
    assert block.together.effect


def test_a_wrong_own_part_is_found(monkeypatch: pytest.MonkeyPatch, llama: Any) -> None:
    monkeypatch.setattr("duat_cli.analysis.compare.patching.of_kinds", lambda block, _kinds: captured.Held(
        [captured.StoredRows(rows.matrix.flip(0)) for rows in block.attention]))  # fmt: skip
    assert not found_of(as_loaded(llama), "blocks").holds


def test_weights_read_block_by_block_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "ABLATION_BYTES", 1 << 14)  # a few passes wait side by side
    loaded = whole(two_saved("llama", tmp_path))
    wanted = [found_of(loaded, what) for what in ("blocks", "tokens")]
    with in_parts(tmp_path) as parts:
        assert [found_of(parts, what) for what in ("blocks", "tokens")] == wanted


def test_tokens_that_are_alike_move_nothing_and_prompts_that_are_alike_have_no_share(llama: Any) -> None:
    loaded = as_loaded(llama)
    first = ids_of(llama, 0)
    other = first.clone()
    other[0, 3] += 1
    prompts = [prompt_of(first), prompt_of(other)]
    found = found_of(loaded, "tokens", [(0, 1)], prompts)
    assert all(token.effect == token.kl == 0 for block in found.blocks for token in block.tokens[:3])
    assert found.blocks[0].tokens[3].effect == pytest.approx(1.0)  # all that differs in front of the first block
    same = found_of(loaded, "blocks", [(0, 1)], prompts[:1] * 2)
    assert same.holds
    assert predictions(same) == ["a, prompt 0, to b, prompt 1: the predictions are alike"]
    why = "the predictions are alike, or infinitely far from each other"
    for effect in (block.H for block in same.blocks):
        assert numbers(effect) == [None] * 3
        assert (effect and effect.reasons["effect"], effect and effect.reasons["kl"]) == (why, why)


def test_the_line_below_the_largest_names_an_option_of_compare(found: Callable[[Patched], Patching]) -> None:
    tokens, shown = found("tokens"), io.StringIO()
    more = tokens.model_copy(update={"blocks": 2 * tokens.blocks})
    Console(file=shown, width=200).print(*patches(more, Page(width=200)))
    assert "smaller ones, see --json" in shown.getvalue()  # it has no --all


def test_the_legend_of_a_picture_names_what_is_drawn(llama: Any, found: Callable[[Patched], Patching]) -> None:
    for patched, lines in ((found_of(as_loaded(llama), "blocks", PAIRS[:1]), 4), (found("blocks"), 8)):
        figure = picture_of(sample.patched_report().model_copy(update={"patched": patched}))
        assert figure is not None
        assert len(figure.legend) == lines


def test_pairs_of_several_lengths(llama: Any) -> None:
    """Each as by itself, their differences summed; a text of another length is no null."""
    texts = [token_ids(llama, tokens, seed) for seed, tokens in enumerate((7, 7, 5, 5))]
    pairs = [(0, 1), (2, 3)]
    prompts = [prompt_of(text) for text in texts]
    assert third_texts(prompts, pairs) is None
    both = found_of(as_loaded(llama), "heads", pairs, prompts)
    assert both.holds
    alone = [found_of(as_loaded(llama), "heads", [pair], prompts) for pair in pairs]
    sizes = [(one.pairs[0].after or 0.0) - (one.pairs[0].before or 0.0) for one in alone]
    for head in range(4):
        effects = [one.blocks[0].heads[head].effect or 0.0 for one in alone]
        whole = sum(size * effect for size, effect in zip(sizes, effects, strict=True)) / sum(sizes)
        assert both.blocks[0].heads[head].effect == pytest.approx(whole)


def test_a_third_text_is_neither_of_the_two(llama: Any) -> None:
    a, b, c = (prompt_of(ids_of(llama, seed)) for seed in range(3))
    assert third_texts([a, b, c], [(0, 1), (0, 2)]) == [2, 1]
    assert third_texts([a, b], [(0, 1)]) is None
    assert third_texts([a, b, replace(b)], [(0, 1), (0, 2)]) is None  # b given twice would give the effect again
    assert third_texts([a, b, replace(a), c], [(0, 1), (2, 0), (2, 3)]) == [3, 3, 1]  # and a's own part nothing
    found = found_of(as_loaded(llama), "tokens", prompts=[a, b, b])
    last = found.blocks[1].tokens[-1]
    assert (last.null, last.reasons) == (None, {"null": NO_THIRD})


def test_what_cannot_be_patched_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no next-token model"):
        found_of(as_loaded(single_model("bert")), "blocks")
    with pytest.raises(UnsupportedModelError, match="blocks read more of the input than the stream"):
        found_of(as_loaded(tiny.tiny_model("zamba2")), "tokens", PAIRS[:1])


def test_a_token_that_leaves_the_range_has_no_share() -> None:
    before, after = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    target = Target(before, after)
    assert target.tokens == (0, 1)
    assert target.ends[0].tolist() == pytest.approx([-1.0, float(kl(after[None], before[None]))])
    assert target.ends[1].tolist() == [1.0, 0.0]
    assert not bool(target.of(torch.tensor([float("nan"), 0.0])).isfinite().all())
