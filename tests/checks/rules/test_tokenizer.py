"""The rule on the tokenizer: faults of files that contradict each other, and good checkpoints that look like them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_checkpoints as bad
import pytest
from running_checks import Duat, Outcome
from short_demo import short_demo

from duat_cli.checks.registry import all_rules
from duat_cli.checks.rule import Evidence, Settings
from duat_cli.loading.declared.facts import Declared
from duat_cli.loading.declared.tokenizer import TokenizerFacts

GEN = "generation_config.json"
RULE = all_rules()["integrity.tokenizer"]


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """To be damaged; most of these checks run the model as well."""
    return short_demo(tmp_path / "demo")


def judged(duat: Duat, folder: Path) -> tuple[Outcome, list[dict[str, Any]]]:
    done = duat("check", folder, "--prompt", "hello there", "-q", "--json")
    return done, [o for o in done.json["outcomes"] if o["rule"] == RULE.id and o["status"] != "passed"]


def tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return edit


def _ordinary(content: dict[str, Any]) -> None:
    """A token is added that is no special one."""
    content["added_tokens"].append({**content["added_tokens"][0], "id": 2048, "content": "<x>", "special": False})


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: bad.jedit(folder / bad.CFG, **fields)


def generation(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: bad.jedit(folder / GEN, **fields)


def cut(folder: Path) -> None:
    name = "model.embed_tokens.weight"
    bad.wedit(folder, lambda state: {**state, name: state[name][:2000].clone()})
    bad.jedit(folder / bad.CFG, vocab_size=2000)


def both(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: (config(**fields)(folder), generation(**fields)(folder))[0]


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (tokenizer(_ordinary), "1 id, 2048 ('<x>'), beyond the 2048 rows of the embedding"),
        (cut, "48 ids, 2000 to 2047"),
        (generation(pad_token_id=2048), "generation_config.json: pad_token_id 2048 is no row"),
        (generation(eos_token_id=[1, 5000]), "generation_config.json: eos_token_id 5000 is no row"),
        (config(eos_token_id=2048), "config.json: eos_token_id 2048 is no row of the embedding, which has 2048"),
        (config(eos_token_id=5), "), the tokenizer's eos_token is 1 ('</s>')"),
        (generation(eos_token_id=5), "generation_config.json: eos_token_id 5"),
        (both(eos_token_id=5), "config.json: eos_token_id 5"),
        (config(eos_token_id=0), "config.json: eos_token_id 0 ('<s>')"),
        (both(bos_token_id=7), "config.json: bos_token_id 7"),
        (lambda d: bad.jedit(d / "tokenizer_config.json", eos_token="<s>"), "the tokenizer's eos_token is 0 ('<s>')"),
        (lambda d: bad.jedit(d / "tokenizer_config.json", eos_token="<end>"), "2048 ('<end>'), beyond"),
        (generation(eos_token_id="1"), "generation_config.json: eos_token_id is '1': expected a whole number"),
        (generation(max_new_tokens=0), "transformers does not load a model beside it: `max_new_tokens` must be"),
        (
            generation(do_sample=True, temperature=0),
            "generate() fails by it: temperature: `temperature` (=0) has",
        ),
        (tokenizer(lambda c: c.update(decoder=None)), "1 text not the same after encoding and decoding"),
    ],
)
def test_what_contradicts_itself_fails(breakage: Any, words: str, demo: Path, duat: Duat) -> None:
    breakage(demo)
    done, found = judged(duat, demo)
    assert done.code == 1
    told = [o for o in found if o["status"] == "failed" and words in o["message"]]
    assert told, found
    assert told[0]["location"]["file"] == str(demo / told[0]["where"])  # the file that is wrong


@pytest.mark.parametrize(
    "change",
    [
        lambda d: None,
        generation(do_sample=False, temperature=0.0),  # not used
        generation(eos_token_id=[1, 0]),  # more ways to end a text
        config(eos_token_id=[1]),
        config(pad_token_id=-1),
        lambda d: (d / GEN).unlink(),
        tokenizer(lambda c: c.update(normalizer={"type": "Lowercase"})),
    ],
)
def test_what_is_sound_passes(change: Any, demo: Path, duat: Duat) -> None:
    change(demo)
    done, found = judged(duat, demo)
    assert (done.code, found) == (0, [])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ later('x') }}{{ messages[0].content }}", "fails: UndefinedError: 'later' is undefined"),
        ("{{ raise_exception('a system message is missing') }}", "fails: TemplateError: a system message is missing"),
        ("{{ bos_token }}assistant:", "leaves out what the user says"),
        ("{% for one in messages %}{{ one.content }}{% endfor %}", None),
    ],
)
def test_a_template_that_writes_out_no_message_warns(template: str, words: str | None, demo: Path, duat: Duat) -> None:
    bad.jedit(demo / "tokenizer_config.json", chat_template=template)
    done, found = judged(duat, demo)
    said = [f"chat template: of one message of a user it {words}"]
    assert (done.code, [o["message"] for o in found]) == (0, [] if words is None else said)


def test_own_prompts_that_have_no_row_fail_the_check_and_do_not_leave_it_undecided(demo: Path, duat: Duat) -> None:
    cut(demo)
    done = duat("check", demo, "--prompt", "Comp 33", "-q", "--json")
    assert done.code == 1
    assert done.rules() == {RULE.id}
    skipped = next(o for o in done.json["outcomes"] if o["rule"] == "exactness.certificate")
    assert "out of the vocabulary" in skipped["message"]


def test_and_it_stays_undecided_where_the_rule_is_off(demo: Path, duat: Duat, tmp_path: Path) -> None:
    cut(demo)
    policy = tmp_path / "p.toml"
    policy.write_text('[rules]\n"integrity.tokenizer" = "off"\n')
    duat("check", demo, "--prompt", "Comp 33", "-q", "--policy", policy).refused("out of the vocabulary")


# --- real checkpoints, by what their files say ------------------------------------------------------------------


def facts(tokens: dict[int, str], special: set[int], template: str = "", front: bool = False, **roles: int):
    return TokenizerFacts(
        vocabulary={n: tokens.get(n, f"t{n}") for n in range(20)} | tokens,
        parts={},
        fields={},
        roles={f"{role}_token": number for role, number in roles.items()},
        special=frozenset(special),
        placeholders=frozenset(n for n, token in tokens.items() if token == "<image>"),
        template=template,
        template_fault=None,
        template_fails=None,
        starts_with_bos=front,
        lost=(),
    )


def levels(said: dict[str, Any], gen: dict[str, Any], found: TokenizerFacts, rows: int = 30) -> list[str | None]:
    evidence = Evidence(None, None, declared=Declared(said, gen, tokenizer=found, rows=rows))  # type: ignore[arg-type]
    return [m.level for m in RULE.measure(evidence, Settings(RULE, "error", 0.0, None))]


TURN = facts({1: "<s>", 2: "</s>", 7: "<|im_end|>"}, {1, 2, 7}, "{{x}}<|im_end|>", bos=1, eos=2)


@pytest.mark.parametrize(
    ("said", "gen", "found", "expected"),
    [
        # generation_config ends a text with more tokens than config.json
        ({"bos_token_id": 1, "eos_token_id": 2}, {"bos_token_id": 1, "eos_token_id": [2, 7]}, TURN, []),
        # config.json of the base, generation_config and tokenizer of the chat
        ({"eos_token_id": 2}, {"eos_token_id": 7}, facts({2: "</s>", 7: "<|im_end|>"}, {2, 7}, eos=7), ["warn"]),
        # both end at the chat template's turn, the tokenizer at the text's end
        ({"eos_token_id": 7}, {"eos_token_id": 7}, TURN, ["warn", "warn"]),
        # the same without a template: nothing explains it
        ({"eos_token_id": 7}, {}, facts({2: "</s>", 7: "<e>"}, {2, 7}, eos=2), [None]),
        # a distilled model whose config.json kept its teacher's bos
        (
            {"bos_token_id": 3},
            {"bos_token_id": 6},
            facts({3: "<e>", 6: "<b>"}, {3, 6}, front=True, bos=6, eos=3),
            ["warn"],
        ),
        # a bos that nobody puts in front
        ({"bos_token_id": 9}, {}, facts({0: "<e>"}, {0}, bos=0, eos=0), ["warn"]),
        # and one that the tokenizer does
        ({"bos_token_id": 9}, {}, facts({0: "<e>"}, {0}, front=True, bos=0, eos=0), [None]),
        # no bos at all in the tokenizer
        ({"bos_token_id": 3}, {"bos_token_id": 3}, facts({3: "<e>"}, {3}, eos=3), []),
        ({"eos_token_id": 3}, {"eos_token_id": 4}, facts({}, {3, 4}), ["warn"]),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, facts({}, {3, 4}), [None]),
        # a text model with the placeholder of its multimodal sibling
        ({}, {}, facts({30: "<image>"}, {30}), ["warn"]),
        ({}, {}, facts({30: "<turn>"}, {30}), [None]),
        # the config inside the config
        ({"text_config.eos_token_id": 40}, {}, facts({}, set()), [None]),
        ({"eos_token_id": -1, "pad_token_id": -1}, {}, facts({2: "</s>"}, {2}, eos=2), []),
        ({"pad_token_id": -2}, {}, facts({}, set()), [None]),
    ],
)
def test_agreement_of_the_files(said: Any, gen: Any, found: TokenizerFacts, expected: list[str | None]) -> None:
    assert levels(said, gen, found) == expected


def test_weights_only_says_that_the_tokenizer_was_not_looked_at(demo: Path, duat: Duat) -> None:
    done = duat("check", demo, "--weights-only", "-q", "--json")
    (outcome,) = (o for o in done.json["outcomes"] if o["rule"] == RULE.id)
    assert (outcome["status"], "--weights-only leaves out" in outcome["message"]) == ("skipped", True)
