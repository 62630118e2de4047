"""Every text type of the installed transformers: exact, partly, or refused with a reason; and of those that are exact
and have a head, the parts of an attribution against the model's own output, in float32 and float64."""

from __future__ import annotations

import functools
from typing import Any

import coverage_page
import pytest
import torch
from attributing import as_double, report_of
from coverage_text import status_of
from helpers import token_ids
from torch import nn

from duat_cli.analysis import session, support
from duat_cli.analysis.support import examine
from duat_cli.errors import DuatError
from duat_cli.models.discovery.structure import ModelStructure, discover
from duat_cli.results.support import SupportEntry
from duat_cli.zoo import tiny

SHARES = 12  # of the types, so that several test processes divide them
EXACT = 0.6  # of those that can be built, where the page of coverage is of another transformers
ONE_LINE = 400
BARS = {torch.float32: 1e-5, torch.float64: 1e-10}  # by what the model itself puts out
FLOAT64_FAILS = {"kosmos_2_text_model", "xglm"}  # their own forward mixes float32 into float64
FLOAT32_OUT = {  # their heads end in `.float()`, in any dtype
    "beam", "falcon_mamba", "mamba", "mamba2", "mllama", "mllama_text_model", "nemotron_h",
}  # fmt: skip
NUMBERS = {"layer_idx", "layer_id", "layer_number", "idx", "block_idx"}  # of a block, as its modules call it
MIXERS = 1e-6  # in float64: a mixer without softmax, or what weighs streams, computes in float32 inside


@pytest.fixture(autouse=True)
def _discovered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was examined is discovered again for its attribution only where it is in another dtype by then."""

    @functools.lru_cache(maxsize=1)
    def found(model: Any, _dtype: torch.dtype) -> ModelStructure:
        return discover(model)

    def once(model: Any, like: Any = None, *, chain: str | None = None, factors: bool = True) -> ModelStructure:
        plain = like is None and chain is None and factors
        return found(model, model.dtype) if plain else discover(model, like, chain=chain, factors=factors)

    for module in (support, session):
        monkeypatch.setattr(module, "discover", once)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_type_is_exact_partly_or_refused_with_a_reason(share: int) -> None:
    """The parts of every second share in float64, of the others in float32; a model that fails in float64 in both."""
    page, exact, entries, missed = coverage_page.current(), 0, 0, []
    for model_type in tiny.text_model_types()[share::SHARES]:
        built = tiny.build(model_type)
        if isinstance(built, tiny.NotBuilt):
            continue
        model = without_repeats(built)
        entry = examine(model, model_type)
        assert_sound(entry)
        assert page is None or page[model_type] == status_of(entry), entry
        entries, exact = entries + 1, exact + (entry.status == "exact")
        headed = model.get_output_embeddings() is not None and not model.config.is_encoder_decoder
        if entry.status == "exact" and headed:
            dtypes = list(BARS) if model_type in FLOAT64_FAILS else list(BARS)[share % 2 :][:1]
            missed += added_up(model, model_type, dtypes)
    assert missed == []
    assert exact >= EXACT * entries > 5


def without_repeats(built: tiny.TinyModel) -> Any:
    """The model with the first two blocks of each stack, where the others are like these and it runs without them."""
    model = built.model
    for name, found in list(model.named_modules()):
        outermost = isinstance(found, nn.ModuleList) and not any(part.isdigit() for part in name.split("."))
        kinds = [kind_of(block) for block in found] if outermost else []
        if kinds[2:] and all(kind in kinds[:2] for kind in kinds[2:]):
            del found[2:]
    try:
        with torch.no_grad():
            model(**built.inputs)
    except Exception:
        return tiny.tiny_model(built.model_type)
    return model


def kind_of(block: nn.Module) -> list[Any]:
    """What its modules are and how they are set, but for the number of the block."""
    plain = (bool, int, float, str, type(None))
    return [
        (name, type(part), {k: v for k, v in vars(part).items() if isinstance(v, plain) and k not in NUMBERS})
        for name, part in block.named_modules()
    ]


def assert_sound(entry: SupportEntry) -> None:
    name = entry.model_type
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


def added_up(model: Any, model_type: str, dtypes: list[torch.dtype]) -> list[Any]:
    """Certificates of the attributions whose parts do not add up to the model's own output."""
    missed = []
    for dtype in dtypes:
        one = model if dtype is torch.float32 else as_double(model)
        ids = token_ids(one, tokens=5)
        if dtype is torch.float64 and model_type in FLOAT64_FAILS:
            with pytest.raises(RuntimeError):
                one(ids)
            with pytest.raises(DuatError, match="its own forward pass fails"):
                report_of(one, ids, position=3)
            continue
        own = one(ids).logits.dtype
        assert own is (torch.float32 if model_type in FLOAT32_OUT else dtype), model_type
        certificate = report_of(one, ids, position=3).certificate
        bars = {BARS[own]} if model_type not in FLOAT32_OUT else {*BARS.values()}
        if dtype is torch.float64 and certificate.tolerance == MIXERS:
            every = [block.parts for block in discover(model).blocks]
            assert any(parts.mixer is not None or parts.streams > 1 for parts in every), model_type
            bars = {MIXERS}
        if not (certificate.residual <= certificate.tolerance in bars and certificate.exact):
            missed.append((model_type, dtype, certificate))
    return missed
