"""A model that exchanges its modules for good is read as it was loaded, or refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paging import in_parts, whole
from torch import Tensor, nn

import duat_cli
from duat_cli.analysis.session import Session
from duat_cli.errors import UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.discovery.exchanged import restored, run_as_loaded, weights_kept
from duat_cli.models.discovery.structure import discover
from duat_cli.models.instrument.hooks import ExchangedError
from duat_cli.models.sweep.lockstep import forwards
from duat_cli.models.terms.sites import find_sites
from duat_cli.zoo import tiny

SHORT, LONG = 15, 44
THRESHOLD = 28  # tokens up to which the tiny BigBird gives up its sparse attention
SPARSE = {"big_bird": "BigBirdBlockSparseAttention", "bigbird_pegasus": "BigBirdPegasusBlockSparseAttention"}


def test_weights_of_a_caller_are_not_written_to() -> None:
    """RWKV rescales its weights in place with the first pass, and a flag of the model that ran says that it did."""
    model = tiny.tiny_model("rwkv").eval()
    model.config.rescale_every = 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"its forward pass writes to a weight of its own \(blocks\.1"):
        duat_cli.inspect(model, prompts=[[40, 41, 42]])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():  # as it does without duat
        model(torch.tensor([[40, 41, 42]]))
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_are_not_in_memory_are_not_written_to_either(tmp_path: Path) -> None:
    """What a pass does to weights that are read block by block would be lost: the model would be another."""
    model = tiny.tiny_model("rwkv").eval()
    model.config.rescale_every = 1
    model.save_pretrained(tmp_path)
    with in_parts(tmp_path) as loaded, pytest.raises(UnsupportedModelError, match=r"writes to a weight of its own"):
        _ = Session(loaded, lambda *_: None).structure
    model.config.rescale_every = 6  # the first six blocks are divided by 1
    model.save_pretrained(tmp_path)
    with in_parts(tmp_path) as loaded:
        assert len(Session(loaded, lambda *_: None).structure.calls) == 3


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8, dtype=torch.int32), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))


def test_what_writes_is_told_by_what_operations_declare() -> None:
    module = Counting()
    weight = module.weight
    writing: list[Callable[[], object]] = [
        functools.partial(weight.add_, 1),
        weight[2:].zero_,
        lambda: torch.add(weight, 1, out=weight),
    ]
    for write in writing:
        with torch.no_grad(), weights_kept(module), pytest.raises(UnsupportedModelError, match=r"own \(weight\)"):
            write()
    assert weight.tolist() == list(range(8))
    with torch.no_grad(), weights_kept(module):
        assert (weight >> 1).tolist() == [k // 2 for k in range(8)]
        torch.empty(0, 4).add_(1)
        weight.add_(0)
        weight.clone().add_(1)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1, keepdim=True).expand_as(x)


class Near(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing: nn.Module = Near()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixing(x)
        return x + mixed


class Switching(nn.Module):
    """As BigBird: short inputs put another module into its blocks, and it stays."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.blocks = True, nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.near and x.shape[1] < THRESHOLD:
            self.near = False
            for block in self.blocks:
                block.mixing = Mixing()
        for block in self.blocks:
            x = block(x)
        return self.scale * x


def inputs(tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(1, tokens, 5, generator=torch.Generator().manual_seed(tokens))}


def test_what_is_let_through_is_what_the_model_gives_as_it_was_loaded() -> None:
    model = Switching()
    for tokens in (LONG, SHORT, THRESHOLD - 1, SHORT):
        assert torch.equal(run_as_loaded(model, inputs(tokens)), Switching()(**inputs(tokens)))
    with pytest.raises(UnsupportedModelError, match=r"runs Near \(blocks\.0\.mixing\), and .* Mixing, which stays"):
        run_as_loaded(model, inputs(LONG))
    assert not model.near  # and it is what its blocks were found on
    assert torch.equal(run_as_loaded(model, inputs(SHORT)), Switching()(**inputs(SHORT)))


def test_what_it_is_run_on_to_know_stops_in_front_of_its_first_block() -> None:
    model, ran = Switching(), list[int]()
    run_as_loaded(model, inputs(SHORT))
    model.blocks[0].register_forward_pre_hook(lambda _module, args: ran.append(args[0].shape[1]))
    with contextlib.suppress(UnsupportedModelError):
        run_as_loaded(model, inputs(LONG))
    run_as_loaded(model, inputs(SHORT))
    assert ran == [SHORT]


def test_passes_of_another_kind_leave_it_as_it_was() -> None:
    model = Switching()
    with restored(model):
        model(**inputs(SHORT))
    assert model.near
    assert torch.equal(run_as_loaded(model, inputs(LONG)), Switching()(**inputs(LONG)))


def test_passes_beside_one_that_exchanges_modules_are_not_believed() -> None:
    model = Switching()
    model.blocks[1].away = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(ExchangedError, match="block by block"):
        run_as_loaded(model, inputs(SHORT))
    assert torch.equal(run_as_loaded(model, inputs(SHORT)), Switching()(**inputs(SHORT)))


def test_they_run_once_more() -> None:
    model = Switching()
    model.blocks[1].away = nn.Parameter(torch.empty(1, device="meta"))
    [found] = forwards(None, [lambda: run_as_loaded(model, inputs(SHORT))])
    assert torch.equal(found, Switching()(**inputs(SHORT)))


def test_what_is_not_in_memory_is_not_read_to_know() -> None:
    model = Switching()
    model.forward, own = lambda x: own(model.first(x)), model.forward  # type: ignore[method-assign]
    model.first = nn.Linear(5, 5)
    run_as_loaded(model, inputs(SHORT))
    model.first = nn.Linear(5, 5, device="meta")
    with pytest.raises(UnsupportedModelError, match="give it memory for all of them"):
        run_as_loaded(model, inputs(SHORT))


# -- BigBird ---------------------------------------------------------------------------------------------------


def big_bird(model_type: str, folder: Path | None = None) -> Any:
    """As a checkpoint states it, with sparse attention."""
    config = tiny.tiny_config(model_type)
    config.attention_type, config.num_random_blocks, config.block_size = "block_sparse", 1, 4
    torch.manual_seed(0)
    model = tiny.model_class(config)._from_config(config, attn_implementation="eager")
    tiny.randomise(model, 0)
    if folder is not None:
        model.save_pretrained(folder)
    return model.eval()


def prompt(tokens: int) -> Prompt:
    ids = torch.randint(40, 60, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return Prompt("", "0" * 64, ids, line=1)


@pytest.mark.parametrize("model_type", SPARSE)
def test_its_heads_are_found_in_the_attention_that_it_runs(model_type: str) -> None:
    structure = discover(big_bird(model_type))
    for sites in find_sites(structure).values():
        assert sites.count("head") > 1


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("model_type", SPARSE)
def test_its_full_attention_is_read_and_its_sparse_attention_refused(
    model_type: str, parts: bool, tmp_path: Path
) -> None:
    fresh = big_bird(model_type, tmp_path)
    fresh = fresh.get_encoder() if fresh.config.is_encoder_decoder else fresh.base_model
    with torch.no_grad():
        expected = fresh(input_ids=prompt(SHORT).input_ids)[0]
    opened = in_parts(tmp_path, kept=2**20) if parts else contextlib.nullcontext(whole(tmp_path))
    with opened as loaded:
        assert torch.allclose(given(loaded, SHORT), expected, atol=1e-5)
        with pytest.raises(UnsupportedModelError, match=f"on an input of {LONG} tokens it runs {SPARSE[model_type]}"):
            given(loaded, LONG)


def given(loaded: LoadedModel, tokens: int) -> Tensor:
    """What a session's pass gives for a prompt."""
    found = list[Any]()
    session = Session(loaded, lambda *_: None, cache=False)
    session.sweep_all([prompt(tokens)], lambda _number: lambda _run: None, lambda _number, output: found.append(output))
    output: Tensor = found[-1][0]
    return output
