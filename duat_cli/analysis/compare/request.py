"""The texts of a `duat compare` request: which of them run, and which are compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from duat_cli.errors import InputError
from duat_cli.loading.inputs.request import InputFiles, label
from duat_cli.loading.prompts import Prompt, read_prompts
from duat_cli.loading.texts import PromptText, all_asked, checked, pairs_of

PAPER = ("Nui zi created Nui zi dynamics", "Nui zi created gravitation and relativity theory")  # by Wang & Li
BREAK = "\n"
ALONE = (
    "compare reads texts, or pictures or sounds, each alone, or pictures with one --prompt that says where each stands"
)


@dataclass(frozen=True)
class Texts:
    """Texts of a request. All of them become tokens; the first `runs` run through the blocks."""

    texts: list[PromptText]
    runs: int
    """How many of the texts run: the first ones."""
    pairs: list[tuple[int, int]]
    """Numbers of the runs that are compared."""
    alone: int | None = None
    """Number of the shared text without a context, where its tokens alone are compared."""
    answered: list[int] = field(default_factory=list)
    """For every run, the number of the same text with the answer behind it."""
    demonstrations: dict[int, list[tuple[int | None, int]]] = field(default_factory=dict)
    """Run -> its contexts in order, each given by the numbers of two texts: one that ends where the context begins
    (None: nothing is in front of it), one that ends where it ends."""
    made_up: bool = False
    """Whether the texts are the paper's, not the user's."""
    question: list[PromptText] = field(default_factory=list)
    """The one text in which each picture stands; empty where none is given."""


def texts_of(
    prompts: Sequence[str | PromptText] | None,
    file: str | None,
    shared: str | None,
    prefixes: Sequence[str] | None,
    answer: str | None,
    *,
    chat: bool = False,
    files: InputFiles | None = None,
) -> Texts:
    """The texts of --prompt, --prompts, or --shared with --prefix and --answer; without any, the paper's own two
    prompts. chat: whether each text is what a user says in a conversation. files: pictures or sounds in place of texts;
    their names are the texts, and a single prompt is the text in which each picture stands."""
    given = [name for name, value in (("--prompt", prompts), ("--prompts", file), ("--shared", shared))
             if value is not None and value != []]  # fmt: skip
    option = None if files is None else files.option
    asks = option == "--image" and given == ["--prompt"] and len(prompts or ()) == 1
    if given and option is not None and not asks:
        raise InputError(f"{option} and {given[0]}: {ALONE}")
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]}: give pairs of prompts in one way")
    for name, value in (("--prefix", prefixes), ("--answer", answer)):
        if value is not None and value != [] and shared is None:
            raise InputError(f"{name}: stands beside --shared TEXT, the text that all contexts have in common")
    if shared is not None and chat:
        raise InputError(
            "--chat: a template stands around a whole text, not between --prefix and --shared; give --prompt"
        )
    if shared is not None:
        return _contexts(shared, list(prefixes or ()), answer)
    if files is not None and option is not None:
        question = read_prompts(prompts or [], None, sys.stdin) if asks else []
        return _of_files(files, option, all_asked(question, chat), chat=chat)
    if file is not None:
        pairs = list(pairs_of(file, sys.stdin))
        texts = [text for pair in pairs for text in pair]
        return Texts(all_asked(texts, chat), len(texts), [(2 * k, 2 * k + 1) for k in range(len(pairs))])
    if not prompts:
        texts = [checked(text, f"the paper's {k}", k) for k, text in enumerate(PAPER, 1)]
    elif len(prompts) == 1:
        raise InputError("--prompt: one prompt has nothing to be compared with; give a second --prompt")
    else:
        texts = read_prompts(prompts, None, sys.stdin)
    return _first_with_each(all_asked(texts, chat), made_up=not prompts)


def _first_with_each(texts: list[PromptText], *, made_up: bool = False) -> Texts:
    return Texts(texts, len(texts), [(0, k) for k in range(1, len(texts))], made_up=made_up)


def _of_files(files: InputFiles, first: str, question: list[PromptText], *, chat: bool) -> Texts:
    if chat and not question:
        raise InputError(f"--chat: a template stands around a text, and {first} is none; leave it out")
    names = [label(option, one, k) for option, each in files.by_option for k, one in enumerate(each, 1)]
    if len(names) == 1:
        raise InputError(f"{names[0]}: one input has nothing to be compared with; give a second {first}")
    texts = _first_with_each([PromptText(name, name, k) for k, name in enumerate(names, 1)])
    return replace(texts, question=question)


def reads_words(prompts: Sequence[Prompt]) -> bool:
    """Whether the prompts are texts, with pictures in them or without."""
    return all(prompt.prepared is None or "input_ids" in prompt.prepared for prompt in prompts)


def as_read(texts: Texts, prompts: Sequence[Prompt]) -> Texts:
    """The texts; for pictures or sounds alone, with the names of these."""
    if reads_words(prompts):
        return texts
    return replace(texts, texts=[PromptText(prompt.text, prompt.text, prompt.line) for prompt in prompts])


def _contexts(shared: str, prefixes: list[str], answer: str | None) -> Texts:
    """The shared text behind each context. With one context, or with an answer, it is compared with the text alone."""
    checked(shared, "--shared", 1)
    if not prefixes:
        raise InputError(
            "--shared: give a --prefix, a text to stand in front of it; with one, it is compared with none"
        )
    if answer is not None and not all(prefix.strip() for prefix in prefixes):
        raise InputError("--prefix: empty; with --answer the text alone is always run, give demonstrations")
    alone = PromptText(shared, "--shared alone", 1)
    each = [PromptText(behind(prefix, shared), f"--prefix {k}", k) for k, prefix in enumerate(prefixes, 1)]
    if answer is None and len(prefixes) > 1:
        return Texts([*each, alone], len(each), [(0, k) for k in range(1, len(each))], alone=len(each))
    if answer is None:
        return Texts([alone, *each], 2, [(0, 1)], alone=0)
    return _answered(alone, each, prefixes, checked(answer, "--answer", 1).text)


def _answered(alone: PromptText, each: list[PromptText], prefixes: list[str], answer: str) -> Texts:
    """Runs with none, each and all of the demonstrations; these with the answer; texts that show where each ends."""
    growing = list(accumulate(prefixes, behind))
    runs = [alone, *each]
    if len(prefixes) > 1:
        runs.append(PromptText(behind(growing[-1], alone.text), "every --prefix", 1))
    texts = [*runs, *(PromptText(behind(run.text, answer, " "), f"{run.where} with --answer", 1) for run in runs)]
    places: dict[int, list[tuple[int | None, int]]] = {}
    for number in range(1, len(runs)):
        several = number > len(each)
        places[number] = []
        for whole, own in zip(growing, prefixes, strict=True) if several else [(prefixes[number - 1],) * 2]:
            front = whole.removesuffix(own)  # with the text between two contexts
            parts = [front, whole] if front else [whole]
            texts += [PromptText(part, f"--prefix {number}", number) for part in parts]
            places[number].append((len(texts) - 2 if front else None, len(texts) - 1))
    pairs = [(0, number) for number in range(1, len(runs))]
    return Texts(texts, len(runs), pairs, 0, list(range(len(runs), 2 * len(runs))), places)


def behind(first: str, second: str, between: str = BREAK) -> str:
    """The second text behind the first, with `between` between them unless there is white space already."""
    apart = not first or first[-1:].isspace() or second[:1].isspace()
    return first + ("" if apart else between) + second
