"""What a model answers: against its own plain pass, in memory and block by block, of every kind of model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from classifiers import KINDS, classifier
from helpers import two_single
from paging import in_parts, two_saved, whole
from transformers import AutoConfig, AutoModelForMaskedLM, ViTConfig, ViTForImageClassification

import duat_cli as duat
from duat_cli.analysis.check.behaviour import EVERY, Answer, Asking
from duat_cli.analysis.inspect.options import Filled, InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.checks.answers import LIMIT, Agreement, Answers, agreement
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.modality import DISCOVERY_TOKENS
from duat_cli.results.behaviour import Behaviour

MASK, SPECIAL = 4, [0, 1]


class Tokenizer:
    """Of a masked language model."""

    mask_token_id, all_special_ids = MASK, SPECIAL


def prompts(rows: int, lengths: tuple[int, ...] = (9, 1, 23)) -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(10, rows, (1, length), generator=generator)
        spans = tuple((2 * k, 2 * k + 2) for k in range(length))
        found.append(Prompt("ä" * 2 * length, f"{number:064}", ids, number, spans))
    return found


def asked(loaded: LoadedModel, texts: list[Prompt], tokenizer: Any = Tokenizer) -> tuple[Behaviour, Answers]:
    asking = Asking(tokenizer)
    inspect(loaded, texts, InspectOptions(cache=False), lambda *_: None, Filled(beside=asking))
    return asking.found(None)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "opt"])
def test_the_loss_is_that_of_a_plain_pass(model_type: str, tmp_path: Path) -> None:
    loaded = whole(two_saved(model_type, tmp_path / "m"))
    texts = prompts(loaded.model.config.vocab_size)
    behaviour, answers = asked(loaded, texts, None)
    losses, entropies, tokens = [], [], []
    with torch.no_grad():
        for prompt in texts:
            logits = loaded.model(input_ids=prompt.input_ids).logits[0].double()
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
            tokens += logits.argmax(dim=-1).tolist()
            if len(logits) > 1:
                target = prompt.input_ids[0, 1:]
                losses.append(torch.nn.functional.cross_entropy(logits[:-1], target, reduction="none"))
    assert behaviour.predicts == "next token"
    assert (behaviour.predictions, behaviour.scored) == (33, 30)
    assert behaviour.loss_per_token == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert behaviour.entropy == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    assert behaviour.scored_bytes == 4 * 30  # two letters of two bytes a token, the first tokens not predicted
    assert behaviour.loss_per_byte == pytest.approx(behaviour.loss_per_token / 4)
    assert answers.tokens == tokens


def test_a_masked_model_is_asked_at_every_seventh_token_all_of_them_masked(tmp_path: Path) -> None:
    loaded = whole(two_saved("bert", tmp_path / "m"))
    assert type(loaded.model) in AutoModelForMaskedLM._model_mapping.values()
    texts = prompts(loaded.model.config.vocab_size)
    texts[0].input_ids[0, 8] = SPECIAL[1]
    behaviour, answers = asked(loaded, texts)
    losses = []
    for prompt, at in ((texts[0], [1]), (texts[2], [1, 8, 15, 22])):
        ids = prompt.input_ids.clone()
        ids[0, at] = MASK
        with torch.no_grad():
            logits = loaded.model(input_ids=ids).logits[0, at].double()
        losses.append(torch.nn.functional.cross_entropy(logits, prompt.input_ids[0, at], reduction="none"))
    assert EVERY == 7
    assert (behaviour.predicts, behaviour.predictions, behaviour.scored) == ("masked token", 5, 5)
    assert behaviour.loss_per_token == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert behaviour.scored_bytes == 4 * 5
    assert len(answers.tokens) == len(answers.margins) == 5


class Bytes:
    """A tokenizer whose tokens are single bytes, of which the first two are special."""

    mask_token_id, all_special_ids = MASK, SPECIAL

    @staticmethod
    def convert_ids_to_tokens(_token: int) -> str:
        return "Ġ"


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_token_of_one_byte_of_a_character_counts_as_one_byte(model_type: str, tmp_path: Path) -> None:
    loaded = whole(two_saved(model_type, tmp_path / "m"))
    texts = [
        replace(p, spans=tuple((k // 2, k // 2 + 1) for k in range(p.input_ids.shape[1])))
        for p in prompts(40, (10, 2, 24))
    ]
    behaviour, _ = asked(loaded, texts, Bytes)
    assert behaviour.scored_bytes == behaviour.scored > 0


def test_a_model_without_a_head_is_asked_for_its_embeddings(tmp_path: Path) -> None:
    two_single("bert").base_model.save_pretrained(tmp_path / "m")
    loaded = whole(tmp_path / "m")
    texts = prompts(loaded.model.config.vocab_size)
    behaviour, answers = asked(loaded, texts)
    assert (behaviour.predicts, behaviour.predictions, behaviour.loss_per_token) == ("embedding", 0, None)
    assert "no head" in behaviour.reasons["loss_per_token"]
    assert len(answers.embeddings) == 3
    with torch.no_grad():
        pooled = [loaded.model(input_ids=p.input_ids).last_hidden_state[0].mean(dim=0) for p in texts]
        loaded.model.encoder.layer[0].output.dense.weight.mul_(1.5)
        moved = [loaded.model(input_ids=p.input_ids).last_hidden_state[0].mean(dim=0) for p in texts]
    true = float(torch.cosine_similarity(torch.stack(pooled), torch.stack(moved)).mean())
    found = agreement(answers, asked(loaded, texts)[1], "float32")
    assert isinstance(found, Agreement)
    assert found.error is not None
    assert found.distance > found.allowed
    assert abs(1 - found.distance - true) <= 4 * found.error


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "gemma2"])
def test_weights_read_block_by_block_give_the_same_numbers(model_type: str, tmp_path: Path) -> None:
    folder = two_saved(model_type, tmp_path / "m")
    resident = whole(folder)
    texts = prompts(resident.model.config.vocab_size)
    with in_parts(folder) as loaded:
        assert asked(loaded, texts) == asked(resident, texts)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_answers_that_wait_for_the_last_block_hold_nothing_of_vocabulary_size(model_type: str, tmp_path: Path) -> None:
    answers: list[Answer] = []

    class Watched(Asking):
        def take(self, answer: Answer) -> None:
            answers.append(answer)
            super().take(answer)

    folder = two_saved(model_type, tmp_path / "m")
    with in_parts(folder) as loaded:
        inspect(
            loaded,
            prompts(50, (9, 23, 9)),
            InspectOptions(cache=False),
            lambda *_: None,
            Filled(beside=Watched(Tokenizer)),
        )
    assert len(answers) == 3
    assert len({id(answer.tally.likely) for answer in answers}) == 1
    assert not [value for answer in answers for value in vars(answer.tally).values() if isinstance(value, torch.Tensor)]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize("headless", [False, True])
def test_processes_that_share_the_prompts_give_the_same_numbers(headless: bool, tmp_path: Path) -> None:
    folder = two_saved("bert" if headless else "llama", tmp_path / "m")
    if headless:
        two_single("bert").base_model.save_pretrained(folder)
    loaded = whole(folder)
    texts = prompts(loaded.model.config.vocab_size, (9, 1, 23, 9, 9, 17))
    assert asked(replace(loaded, processes=3), texts) == asked(loaded, texts)


def test_weights_are_not_read_once_more_for_the_head(tmp_path: Path) -> None:
    folder = two_saved("llama", tmp_path / "m")
    texts = prompts(50)
    read = []
    for beside in (None, Asking(None)):
        with in_parts(folder) as loaded:
            inspect(loaded, texts, InspectOptions(cache=False), lambda *_: None, Filled(beside=beside))
            assert loaded.paged is not None
            read.append(loaded.paged.pager.bytes_read)
    probes = 2 * DISCOVERY_TOKENS * 32 * 4  # the test for a head reads rows of the embedding of 32 float32
    assert read[0] < read[1] <= read[0] + probes


def test_a_baseline_holds_no_more_answers_than_it_says(tmp_path: Path) -> None:
    loaded = whole(two_saved("gpt2", tmp_path / "m"))
    texts = prompts(loaded.model.config.vocab_size, (60,) * 40)
    _, answers = asked(loaded, texts, None)
    assert len(answers.tokens) == 800 <= LIMIT < 1200  # every third of 2,400


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_classifier_is_asked_for_its_classes_and_a_flip_is_found(kind: str, tmp_path: Path) -> None:
    classifier(kind).save_pretrained(tmp_path / "m")
    loaded = whole(tmp_path / "m")
    texts = prompts(loaded.model.config.vocab_size)
    behaviour, before = asked(loaded, texts, None)
    p = plain(tmp_path / "m", texts)
    count = 33 if kind == "token" else 3
    assert (behaviour.predicts, behaviour.predictions) == ("token class" if kind == "token" else "class", count)
    assert (behaviour.vocabulary, behaviour.scored, behaviour.loss_per_token) == (3, 0, None)
    assert behaviour.entropy == pytest.approx(float(torch.distributions.Categorical(probs=p).entropy().mean()), 1e-5)
    assert before.tokens == p.argmax(dim=-1).tolist()
    assert torch.tensor(before.probabilities, dtype=torch.float64).sub(p).abs().max() < 1e-6
    assert len(before.embeddings) == 3
    head = getattr(loaded.model, "score", None) or loaded.model.classifier
    with torch.no_grad():  # all that the most likely class of the first prediction is made of goes to another
        head.weight[:] = head.weight[[(row + 1) % 3 for row in range(3)]] * 1.5
    loaded.model.save_pretrained(tmp_path / "m")
    q = plain(tmp_path / "m", texts)
    found = agreement(before, asked(loaded, texts, None)[1], "float32")
    assert isinstance(found, Agreement)
    flipped = (p.argmax(dim=-1) != q.argmax(dim=-1)).double().mean()
    assert 0 < found.distance == pytest.approx(float(flipped))
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(dim=-1).mean()), rel=1e-4)
    assert found.kl > found.kl_allowed


def plain(folder: Path, texts: list[Prompt]) -> torch.Tensor:
    """(predictions, classes): transformers' own probabilities in float64."""
    config = AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        rows = [model(input_ids=prompt.input_ids).logits.reshape(-1, 3) for prompt in texts]
    return torch.cat(rows).softmax(dim=-1)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_classifier_read_block_by_block_gives_the_same_numbers(kind: str, tmp_path: Path) -> None:
    classifier(kind).save_pretrained(tmp_path / "m")
    resident = whole(tmp_path / "m")
    texts = prompts(resident.model.config.vocab_size)
    with in_parts(tmp_path / "m") as loaded:
        assert asked(loaded, texts, None) == asked(resident, texts, None)


def test_a_class_for_pretraining_is_asked_for_masked_tokens(tmp_path: Path) -> None:
    config = two_single("bert").config
    transformers.BertForPreTraining._from_config(config).save_pretrained(tmp_path / "m")
    loaded = whole(tmp_path / "m")
    texts = prompts(config.vocab_size)
    behaviour, _ = asked(loaded, texts)
    found = []
    for ids in (text.input_ids for text in texts):
        at = range(1, ids.shape[1], EVERY)
        hidden = ids.clone()
        hidden[0, list(at)] = MASK
        with torch.no_grad():
            odds = loaded.model(input_ids=hidden).prediction_logits[0].double().log_softmax(dim=-1)
        found += [-float(odds[place, ids[0, place]]) for place in at]
    assert (behaviour.predicts, behaviour.scored) == ("masked token", len(found))
    assert behaviour.loss_per_token == pytest.approx(sum(found) / len(found), rel=1e-6)


@pytest.mark.parametrize("name", ["BertForMultipleChoice", "BertForQuestionAnswering", "BertForNextSentencePrediction"])
def test_a_head_that_is_not_read_is_named_and_not_denied(name: str, tmp_path: Path) -> None:
    config = two_single("bert").config
    getattr(transformers, name)._from_config(config).save_pretrained(tmp_path / "m")
    loaded = whole(tmp_path / "m")
    behaviour, answers = asked(loaded, prompts(config.vocab_size))
    assert (behaviour.predicts, len(answers.embeddings)) == ("embedding", 3)
    assert behaviour.reasons["loss_per_token"] == f"what the head of {name} gives is not read"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"problem_type": "multi_label_classification"}, "its labels may hold together"),
        ({"id2label": {0: "stars"}}, "it gives numbers, no distribution over classes"),
    ],
)
def test_labels_that_hold_together_and_a_regression_are_no_classes(
    fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    classifier("text", **fields).save_pretrained(tmp_path / "m")
    loaded = whole(tmp_path / "m")
    behaviour, answers = asked(loaded, prompts(loaded.model.config.vocab_size), None)
    assert (behaviour.predicts, answers.tokens, len(answers.embeddings)) == ("embedding", [], 3)
    assert behaviour.reasons["entropy"].startswith(why)


def test_a_masked_model_without_a_mask_token_says_so(tmp_path: Path) -> None:
    loaded = whole(two_saved("bert", tmp_path / "m"))
    behaviour, answers = asked(loaded, prompts(loaded.model.config.vocab_size), object)
    assert (behaviour.predicts, len(answers.embeddings)) == ("embedding", 3)
    assert behaviour.reasons["loss_per_token"].startswith("the tokenizer has no mask token")


def test_a_tokenizer_that_does_not_say_which_text_a_token_is(tmp_path: Path) -> None:
    loaded = whole(two_saved("gpt2", tmp_path / "m"))
    texts = [Prompt(p.text, p.sha256, p.input_ids, p.line) for p in prompts(loaded.model.config.vocab_size)]
    behaviour, _ = asked(loaded, texts, None)
    assert (behaviour.scored_bytes, behaviour.loss_per_byte) == (None, None)
    assert "tokenizer" in behaviour.reasons["loss_per_byte"]
    assert behaviour.loss_per_token is not None


class WholeForImageClassification(ViTForImageClassification):
    """It gives logits alone, as transformers' wrapper around models of timm does."""

    base_model_prefix = ""


def test_a_classifier_that_gives_no_hidden_states_is_asked_for_its_classes() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = WholeForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)).eval()
    picture = {"pixel_values": torch.randn(1, 3, 8, 8)}
    behaviour = duat.check(model, inputs=[picture]).behaviour
    assert behaviour is not None
    logits = model(**picture).logits[0].detach()
    entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert (behaviour.predicts, behaviour.vocabulary) == ("class", 3)
    assert behaviour.entropy == pytest.approx(float(entropy), rel=1e-5)
    assert behaviour.logit_range == pytest.approx(float(logits.max() - logits.min()), rel=1e-5)
