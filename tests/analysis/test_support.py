"""Every text model type of the installed transformers: exact, partly, or refused with a reason."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from helpers import single_model

from duat_cli.analysis.support import entry_of_type, examine
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.support import SupportEntry
from duat_cli.zoo import tiny

REQUIRED = [  # what most checkpoints are made of
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "olmo2", "cohere", "stablelm", "starcoder2", "granite", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "bloom",
    "falcon", "gptj", "mpt", "gpt_oss", "deepseek_v3", "nemotron", "smollm3", "bert", "roberta", "distilbert",
    "electra",
]  # fmt: skip
EXACT = 238  # of 289 listed and 283 that can be built, transformers 5.23.0
SHARE = 0.6  # of those that can be built, with any other version
ONE_LINE = 400


def entry_of(model_type: str) -> SupportEntry | None:
    built = tiny.build(model_type)
    return None if isinstance(built, tiny.NotBuilt) else examine(built.model, model_type)


MECHANISMS = [  # one type for each way in which a block differs from theirs
    "mobilebert", "dbrx", "muse_spark_text", "axk2", "diffusion_gemma_text", "t5gemma2_text",
    "led",
]  # fmt: skip


@pytest.mark.parametrize("model_type", [*REQUIRED, *MECHANISMS])
def test_the_required_types_are_exact(model_type: str) -> None:
    entry = entry_of(model_type)
    assert entry is not None
    assert entry.status == "exact", entry
    assert entry.parts == []
    assert entry.reason is None
    assert entry.relative_error is not None
    assert entry.relative_error <= 1e-5


def test_a_refused_type_has_a_reason_and_no_number() -> None:
    entry = entry_of("fnet")
    assert entry is not None
    assert entry.status == "refused"
    assert entry.relative_error is None
    assert "FNetFor" in (entry.reason or "")


@pytest.mark.parametrize(
    ("model_type", "status", "why"),
    [
        ("zamba2", "partly", "reaches the stream only as part of what the token mixer behind it reads"),
        ("inkling_text", "partly", "mixed among tokens"),
        ("vit_mae", "refused", "its forward pass draws random numbers"),
        ("timesformer", "refused", "it calls attention 2 times, each over another number of tokens"),
    ],
)
def test_what_is_not_covered_is_said_by_its_mechanism(model_type: str, status: str, why: str) -> None:
    entry = entry_of_type(model_type)
    assert entry.status == status
    assert why in "".join([*entry.parts, entry.reason or ""])


def test_a_model_that_rebuilds_to_nan_is_not_exact() -> None:
    model = single_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    entry = examine(model)
    assert entry.status == "refused"
    assert entry.reason


def test_a_loaded_checkpoint_is_examined_under_its_own_type(loaded: LoadedModel) -> None:
    from duat_cli.analysis.support import support_of

    entry = support_of(loaded)
    assert (entry.model_type, entry.status, entry.path) == ("llama", "exact", "attention interface")


@pytest.mark.slow
def test_every_type_is_exact_partly_or_refused_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    entries = {t: e for t in tiny.text_model_types() if (e := entry_of(t)) is not None}
    for name, entry in entries.items():
        if entry.status == "refused":
            assert entry.reason, name
            assert entry.relative_error is None, name
        else:
            assert entry.relative_error is not None, name
            assert entry.relative_error <= 1e-5, (name, entry.relative_error)
            assert entry.reason is None, name
            assert bool(entry.parts) == (entry.status == "partly"), name
        for text in (*entry.parts, entry.reason or ""):
            assert "\n" not in text, name
            assert len(text) <= ONE_LINE, name
    counts = Counter(entry.status for entry in entries.values())
    with capsys.disabled():
        print(f"\n{len(entries)} types: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
    known = transformers.__version__ == "5.23.0"
    assert counts["exact"] >= (EXACT if known else SHARE * len(entries)), sorted(
        n for n, e in entries.items() if e.status != "exact"
    )
