"""Replay is the block's own, hooks leave no trace, and one block is alive at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import InDouble, far, first_two, single_model, token_ids
from torch import Tensor, nn
from two_blocks import double, single

from duat_cli.models.block.slots import HiddenSlot
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.records import Substitutes
from duat_cli.models.instrument.rig import BlockRun, zero_given

TYPES = ["llama", "gemma2", "gpt2", "opt", "bloom", "bert", "deepseek_v3"]


class StoppedError(Exception):
    pass


def sweep(structure: ModelStructure, ids: Tensor, listen: Callable[[BlockRun], None]) -> None:
    with structure.rig().active() as rig:
        rig.run(lambda: run_stack(structure.stack, ids), listen)


def instrumented(model: nn.Module) -> list[nn.Module]:
    """The very modules whose forward is replaced right now."""
    return [module for module in model.modules() if "forward" in module.__dict__]


def own_output(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids)[0]


def assert_untouched(model: Any, before: Tensor, ids: Tensor, touched: list[nn.Module] | None = None) -> None:
    for module in [*model.modules(), *(touched or [])]:
        assert "forward" not in module.__dict__, type(module)
        assert module.forward.__func__ is type(module).forward
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.base_model.config._attn_implementation == "eager"
    assert torch.equal(own_output(model, ids), before)


@pytest.mark.parametrize("model_type", [*TYPES, "deepseek_v32", "glm_moe_dsa", "gpt_oss", "mistral"])
def test_what_runs_in_the_rig_is_the_model(model_type: str) -> None:
    """On more tokens than discovery had: sparse attention leaves keys out only then."""
    _, structure = single(model_type)
    ids = token_ids(structure.stack, 24)
    with torch.no_grad():
        own = run_stack(structure.stack, ids)[0]
    seen: list[Tensor] = []
    with structure.rig().active() as rig:
        rig.run(lambda: seen.append(run_stack(structure.stack, ids)[0]), lambda run: None)
    assert far(seen[0], own) <= 1e-5


@pytest.mark.parametrize("model_type", TYPES)
def test_a_run_leaves_nothing_behind(model_type: str) -> None:
    model = first_two(single_model(model_type))
    ids = token_ids(model)
    before = own_output(model, ids)
    structure = discover(model)
    assert_untouched(model, before, ids)  # discovery is such a run, too
    touched: dict[nn.Module, None] = {}

    def listen(run: BlockRun) -> None:
        touched.update(dict.fromkeys(instrumented(model)))
        run.replay(run.input, zero_given(run, 1))

    sweep(structure, ids, listen)
    for block in structure.blocks:  # during the run they are the instrumented ones
        assert {block.parts.module, *block.parts.norms, *block.parts.units} <= set(touched)
    assert_untouched(model, before, ids, list(touched))


@pytest.mark.parametrize("model_type", ["llama", "bloom", "bert"])
@pytest.mark.parametrize("place", ["between blocks", "inside a replay", "inside a block"])
def test_an_exception_leaves_nothing_behind(model_type: str, place: str) -> None:
    model = first_two(single_model(model_type))
    ids = token_ids(model)
    before = own_output(model, ids)
    structure = discover(model)
    touched: list[nn.Module] = []

    def listen(run: BlockRun) -> None:
        touched.extend(instrumented(model))
        if run.index < 1:
            return
        if place == "between blocks":
            raise StoppedError
        if place == "inside a replay":
            run.recording.units.clear()
            run.replay(run.input, [])

    if place == "inside a block":
        unit = structure.blocks[-1].parts.units[0]
        handle = unit.register_forward_pre_hook(_stop)
    with pytest.raises((StoppedError, IndexError)):
        sweep(structure, ids, listen)
    if place == "inside a block":
        handle.remove()
    assert touched
    assert_untouched(model, before, ids, touched)


def _stop(module: nn.Module, args: Any) -> None:
    raise StoppedError


def test_a_forward_of_the_modules_own_is_put_back() -> None:
    """accelerate and others put a forward on the instance; it must be that very object again."""
    model = first_two(single_model("llama"))
    norm = model.model.layers[1].input_layernorm
    original, calls = norm.forward, []

    def own(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x)

    norm.forward = own
    structure = discover(model)
    assert norm in structure.blocks[1].parts.norms
    assert norm.__dict__["forward"] is own
    calls.clear()
    sweep(structure, token_ids(model), lambda run: None)
    assert norm.__dict__["forward"] is own
    assert len(calls) == 1


@pytest.mark.parametrize("model_type", [*TYPES, "falcon", "mixtral", "olmo2", "phi", "gpt_oss", "granite"])
def test_replay_at_the_captured_input_is_the_blocks_own_output(model_type: str) -> None:
    model, structure = double(model_type)
    errors: list[float] = []

    def listen(run: BlockRun) -> None:
        given = [unit.output[None] for unit in run.units]
        output = run.replay(run.input, given).output
        errors.append(far(output, run.output))

    with InDouble():
        sweep(structure, token_ids(model), listen)
    assert len(errors) == 2
    assert max(errors) <= 1e-12


@pytest.mark.parametrize("model_type", TYPES)
def test_replay_is_affine_in_the_stream_and_in_what_units_return(model_type: str) -> None:
    """z ↦ T z + c + U f, and batched items do not see each other."""
    model, structure = double(model_type)

    def listen(run: BlockRun) -> None:
        generator = torch.Generator().manual_seed(run.index)

        def noise(like: Tensor, items: int) -> Tensor:
            return torch.randn(items, *like.shape[-like.ndim :], generator=generator, dtype=torch.float64)

        x = torch.randn(2, *run.input.shape[1:], generator=generator, dtype=torch.float64)
        f = [noise(u.output, 2) for u in run.units]
        nothing = zero_given(run, 1)
        items = torch.cat([x, x[:1] + 3 * x[1:], torch.zeros_like(x[:1])])
        given = [torch.cat([g, g[:1] + 3 * g[1:], torch.zeros_like(g[:1])]) for g in f]
        a, b, mixed, origin = run.replay(items, given).output
        assert far(mixed - origin, (a - origin) + 3 * (b - origin)) <= 1e-11
        alone = run.replay(x[1:], [g[1:] for g in f]).output[0]
        assert far(b, alone) <= 1e-12
        assert far(run.replay(run.input, nothing).output[0], run.output[0]) > 1e-3  # the units do matter

    with InDouble():
        sweep(structure, token_ids(model), listen)


def test_a_replay_takes_equal_items_through_a_linear_layer_once_and_of_zeros_one_token() -> None:
    layer, rows = nn.Linear(6, 5, dtype=torch.float64), list[int]()
    x = torch.randn(3, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    items = torch.stack([torch.zeros_like(x[0]), x[0], torch.zeros_like(x[0]), x[1], x[0]])

    def counted(z: Tensor) -> Tensor:
        rows.append(z.shape[:-1].numel())
        return layer(z)

    with torch.no_grad():
        for given, read in ((items, 2 * 7 + 1), (x, 3 * 7), (items[:1].expand(2, 7, 6), 1)):
            rows.clear()
            plan = Substitutes(None, len(given), [], None, False, [])  # type: ignore[arg-type]
            assert far(plan.once_each(counted, given), layer(given)) <= 1e-14
            assert sum(rows) == read
    plan = Substitutes(None, len(items), [], None, False, [])  # type: ignore[arg-type]
    assert plan.once_each(counted, items).requires_grad  # with a graph, every item by itself
    assert rows[-1] == items.shape[:-1].numel()


def test_a_norm_is_not_frozen_outside_replay() -> None:
    """The affinity above can fail: the block itself is far from affine."""
    model, _ = single("llama")
    block = model.model.layers[0]
    x = torch.randn(1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        position = model.model.rotary_emb(x, torch.arange(5)[None])
        f = [HiddenSlot(0).found(block(z, position_embeddings=position), x) for z in (x, 2 * x, torch.zeros_like(x))]
    assert far(f[1] - f[2], 2 * (f[0] - f[2])) > 1e-2


def test_attention_can_be_replaced() -> None:
    model, structure = double("llama")

    def listen(run: BlockRun) -> None:
        nothing, extra = zero_given(run, 1), torch.ones_like(run.attention[0].output)
        base = run.replay(run.input, nothing)
        added, twice = (run.replay(run.input, nothing, attention=base.mixed[0] + k * extra) for k in (1, 2))
        same = run.replay(run.input, nothing, attention=base.mixed[0])
        assert far(added.mixed[0], base.mixed[0] + extra) <= 1e-14
        assert far(same.output, base.output) <= 1e-14
        assert far(twice.output - base.output, 2 * (added.output - base.output)) <= 1e-12
        assert far(added.output, base.output) > 1e-3

    with InDouble():
        sweep(structure, token_ids(model), listen)


def test_values_alone_can_be_asked_for() -> None:
    model, structure = single("llama")

    def listen(run: BlockRun) -> None:
        replay = run.replay(run.input, zero_given(run, 1), stop_at_values=True)
        assert replay.output is None
        assert far(replay.values[0], run.attention[0].value) <= 1e-6

    sweep(structure, token_ids(model), listen)


@pytest.mark.parametrize("model_type", ["llama", "bert", "bloom"])
def test_one_blocks_tensors_are_alive_at_a_time(model_type: str) -> None:
    """H and the recorded FFN outputs of a block are freed before the next block is handed over."""
    model, structure = single(model_type)
    earlier: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def listen(run: BlockRun) -> None:
        alive.append(sum(ref() is not None for ref in earlier))
        earlier.append(weakref.ref(run.attention[0].rows.matrix))
        earlier.extend(weakref.ref(u.output) for u in run.units)

    gc.disable()  # references alone must do it: a collection may come late
    try:
        sweep(structure, token_ids(model), listen)
    finally:
        gc.enable()
    assert len(earlier) == 2 * len(structure.calls)
    assert alive == [0] * len(structure.calls)
    assert not any(ref() is not None for ref in earlier)


def test_the_memory_check_can_fail() -> None:
    model, structure = single("llama")
    kept: list[BlockRun] = []
    refs: list[weakref.ref[Any]] = []

    def listen(run: BlockRun) -> None:
        kept.append(run)
        refs.append(weakref.ref(run.attention[0].rows.matrix))

    sweep(structure, token_ids(model), listen)
    assert all(ref() is not None for ref in refs)


@pytest.mark.parametrize(("first", "second"), [("llama", "gpt2"), ("llama", "bloom"), ("bloom", "llama")])
def test_two_models_are_instrumented_at_once(first: str, second: str) -> None:
    """Each attention module is asked for its own probe: a run of one model inside a block of the other."""

    def forward(model: Any, ids: Tensor, structure: ModelStructure, inside: Any = None) -> list[Tensor]:
        seen: list[Tensor] = []

        def listen(run: Any) -> None:
            if inside is not None and run.index == 0:
                inside()
            seen.extend([run.attention[0].output, run.output])

        with structure.rig().active() as rig:
            rig.run(lambda: run_stack(structure.stack, ids), listen)
        return seen

    models = [single(name) for name in (first, second)]
    runs = [(model, token_ids(model, 7 + k), structure) for k, (model, structure) in enumerate(models)]
    alone = [forward(*run) for run in runs]
    inner: list[Tensor] = []
    together = forward(*runs[0], lambda: inner.extend(forward(*runs[1])))
    for expected, got in ((alone[0], together), (alone[1], inner)):
        assert len(expected) == len(got) > 0
        assert all(map(torch.equal, expected, got))
