"""What is said of a model type: exact, partly, or refused with a reason; of every type in test_every_type.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import UNLIKE, single_model

from duat_cli.analysis.support import entry_of_type, examine
from duat_cli.loading.model.load import LoadedModel
from duat_cli.results.support import SupportEntry
from duat_cli.zoo import tiny


def entry_of(model_type: str) -> SupportEntry | None:
    built = tiny.build(model_type)
    return None if isinstance(built, tiny.NotBuilt) else examine(built.model, model_type)


REQUIRED = [  # of what most checkpoints are made of, those unlike each other
    *UNLIKE, "qwen3", "gemma3_text", "gpt_bigcode", "gptj", "mpt",
]  # fmt: skip
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


def test_of_a_broken_checkpoint_the_weights_are_the_reason(loaded: LoadedModel) -> None:
    from duat_cli.analysis.support import support_of

    name = "model.layers.1.self_attn.o_proj.weight"
    loaded.model.get_parameter(name).data[0, 0] = torch.nan
    entry = support_of(replace(loaded, nonfinite_weights={name: 1}))
    assert entry.status == "refused"
    assert str(entry.reason).startswith(f"{name} holds values that are NaN or infinite; ")
