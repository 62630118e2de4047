"""`compare` of two prompts against `inspect` of one."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import Row, interleaved, llama_shape, loaded_model, random_prompt

CHANGED = 4  # every fourth token of the second prompt is another one


def compare(runs: int) -> list[Row]:
    from duat_cli.analysis.compare.request import Texts
    from duat_cli.analysis.compare.run import CompareOptions
    from duat_cli.analysis.compare.run import compare as compute
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.run import inspect
    from duat_cli.loading.texts import PromptText
    from duat_cli.loading.words import Words

    loaded, first = loaded_model(llama_shape()), random_prompt(49152, 128)
    ids = first.input_ids.clone()
    ids[:, ::CHANGED] += 1
    texts = Texts([PromptText("a", "a", 1), PromptText("b", "b", 2)], 2, [(0, 1)])
    prompts, words = [first, replace(first, input_ids=ids)], Words(None)

    def one() -> None:
        inspect(loaded, prompts[:1], InspectOptions(cache=False), lambda *_: None)

    def two() -> None:
        report = compute(loaded, texts, prompts, CompareOptions(cache=False), words, lambda *_: None)
        assert report.certificate.exact

    inspected, compared = interleaved([one, two], runs)
    return [
        Row("inspect of a prompt of 128 tokens", inspected, "s"),
        Row("compare of two, to inspect of one", compared / inspected, "x", "<= 2.6"),
    ]
