"""Weights read block by block give the report that weights in memory give: every number."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import prompt_of, quiet
from paging import differing, in_parts, pager_of, two_saved, whole
from sharing import SHARING
from torch.multiprocessing.reductions import StorageWeakRef

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.analysis.matrix.run import matrix
from duat_cli.analysis.plan import waves
from duat_cli.analysis.session import Session
from duat_cli.errors import DuatError, InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.paged.layout import Page
from duat_cli.loading.paged.pager import Pager
from duat_cli.loading.prompts import Prompt

TYPES = [
    "gpt2", "bert", "albert", "t5", "mixtral", "deberta-v2", "zamba", "nystromformer",
    "llama4_text", "gemma3n_text", "hy_v4", "deepseek_v4", "xlnet", *SHARING,
]  # fmt: skip
NULLS = [InspectOptions(cache=False, null="uniform"), InspectOptions(cache=False)]
PROVED = {"gpt2", "t5", "mixtral", "gemma4 sharing"}  # verify reads its weights as inspect does, by Session.sweep_all


def prompts_of(loaded: LoadedModel) -> list[Prompt]:
    rows = loaded.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(5)
    return [prompt_of(torch.randint(40, rows, (1, n), generator=generator)) for n in (3, 5)]


def reports(loaded: LoadedModel, *, proved: bool = True) -> list[dict[str, Any]]:
    """With everything but the network drawn anew, which test_untrained.py reads block by block."""
    prompts = prompts_of(loaded)
    options = InspectOptions(
        cache=False, terms=True, end_to_end=True, routing=True, spectrum=True, per_prompt=True, null="uniform"
    )
    found = [inspect(loaded, prompts, options, quiet), *([verify(loaded, prompts, quiet)] if proved else [])]
    return [report.model_dump(mode="json", exclude={"run"}) for report in found]


@pytest.mark.parametrize("model_type", TYPES)
def test_inspect_and_verify(model_type: str, tmp_path: Path) -> None:
    expected, refused, proved = None, "", model_type in PROVED
    known = whole(two_saved(model_type, tmp_path))
    try:
        expected = reports(known, proved=proved)
    except DuatError as fault:
        refused = str(fault)
    with in_parts(tmp_path) as loaded:
        if expected is None:
            with pytest.raises(DuatError) as seen:
                reports(loaded, proved=proved)
            assert str(seen.value) == refused
        else:
            assert differing(reports(loaded, proved=proved), expected) == []


def test_another_dtype(tmp_path: Path) -> None:
    expected = reports(whole(two_saved("llama", tmp_path), "bfloat16"), proved=False)
    with in_parts(tmp_path, "bfloat16") as loaded:
        assert differing(reports(loaded, proved=False), expected) == []


def test_a_block_of_w(tmp_path: Path) -> None:
    known = whole(two_saved("llama", tmp_path))
    prompt = prompts_of(known)[0]
    expected = matrix(known, prompt, 1, str, quiet).model_dump(exclude={"run"})
    with in_parts(tmp_path) as loaded:
        assert matrix(loaded, prompt, 1, str, quiet).model_dump(exclude={"run"}) == expected


@pytest.mark.parametrize("command", [verify, *(functools.partial(inspect, options=one) for one in NULLS)])
def test_a_block_is_gone_when_the_next_one_is_put_in_its_place(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, held, left = Pager._put, list[StorageWeakRef](), list[int]()

    def watched(pager: Pager, page: Page) -> Any:
        left.append(sum(not one.expired() for one in held))
        stood = put(pager, page)
        inside = (p for door in page.doors for p in door.parameters() if page.block and not p.is_meta)
        held[:] = [StorageWeakRef(parameter.untyped_storage()) for parameter in inside]
        return stood

    two_saved("mixtral", tmp_path)
    monkeypatch.setattr(Pager, "_put", watched)
    with in_parts(tmp_path) as loaded:
        command(loaded, prompts_of(loaded), progress=quiet)
    assert len(left) >= 3
    assert not any(left)


@pytest.mark.parametrize("count", [1, 2])
def test_inspect_reads_the_weights_once_whatever_the_prompts(count: int, tmp_path: Path) -> None:
    two_saved("llama", tmp_path)
    with in_parts(tmp_path) as loaded:
        inspect(loaded, prompts_of(loaded)[:count], InspectOptions(cache=False), quiet)
        rows = (4 * 11 + 2 * 3 + 5) * 32 * 4  # of the embedding: discovery, the first prompt twice, the second
        assert loaded.files.total_bytes <= pager_of(loaded).bytes_read <= loaded.files.total_bytes + rows


def test_memory_and_time_are_taken_once_all_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding or a head of which rows were enough is read whole at the end, for the fingerprint."""
    two_saved("llama", tmp_path)
    read: list[int] = []
    own = Session.run_facts

    def counted(session: Session, *given: Any) -> Any:
        assert session.loaded.paged is not None
        read.append(session.loaded.paged.pager.bytes_read)
        return own(session, *given)

    monkeypatch.setattr(Session, "run_facts", counted)
    for command in (lambda *given: inspect(*given, InspectOptions(cache=False), quiet), lambda *g: verify(*g, quiet)):
        with in_parts(tmp_path) as loaded:
            command(loaded, prompts_of(loaded))
            assert read.pop() == pager_of(loaded).bytes_read > 0


def test_prompts_that_do_not_fit_side_by_side_go_in_waves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_saved("llama", tmp_path)
    expected = reports(whole(tmp_path))
    monkeypatch.setattr(waves, "WAVE_BYTES", 1)
    with in_parts(tmp_path) as loaded:
        assert differing(reports(loaded), expected) == []
        assert pager_of(loaded).bytes_read > 3.5 * loaded.files.total_bytes  # two reports of two prompts


def test_a_block_that_is_not_there_is_refused_before_and_behind_the_sweep(tmp_path: Path) -> None:
    two_saved("llama", tmp_path)
    with in_parts(tmp_path) as loaded:
        with pytest.raises(InputError, match="no block 2; the model has blocks 0 to 1"):
            inspect(loaded, prompts_of(loaded), InspectOptions(cache=False, layers=frozenset({2})), quiet)
        assert pager_of(loaded).bytes_read < loaded.files.total_bytes / 2
        report = inspect(loaded, prompts_of(loaded), InspectOptions(cache=False, layers=frozenset({1})), quiet)
    assert [block.index for block in report.blocks] == [1]


def test_weights_that_are_no_numbers_are_blamed(tmp_path: Path) -> None:
    known = whole(two_saved("llama", tmp_path))
    with torch.no_grad():
        known.model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    known.model.save_pretrained(tmp_path)
    with in_parts(tmp_path) as loaded, pytest.raises(DuatError, match=r"layers.1.mlp.up_proj.weight holds 1 values"):
        inspect(loaded, prompts_of(loaded), InspectOptions(cache=False), quiet)


def test_weights_used_past_their_module_are_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    own = LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.layers[1].mlp.up_proj.weight.sum().item()
        return own(self, *args, **kwargs)

    two_saved("llama", tmp_path)
    monkeypatch.setattr(LlamaModel, "forward", forward)
    with (
        in_parts(tmp_path) as loaded,
        pytest.raises(UnsupportedModelError, match=r"could not be replayed|past the mod"),
    ):
        inspect(loaded, prompts_of(loaded), InspectOptions(cache=False), quiet)
