"""`inspect` against one plain forward pass."""

from __future__ import annotations

import time

from benchmarks.common import Row, interleaved, llama_shape, loaded_model, random_prompt

EACH = 12  # prompts for each core


def speed(runs: int) -> list[Row]:
    import torch

    from duat_cli.analysis.decomposition import Decomposition
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.run import sweep_in_order, sweep_prompts
    from duat_cli.analysis.session import Session
    from duat_cli.cli.shared.many import processes
    from duat_cli.loading.model.processes import Processes
    from duat_cli.models.instrument.rig import BlockRun

    model, prompt = llama_shape(), random_prompt(49152, 128)
    ids, cores = prompt.input_ids, processes()
    many = 1 + EACH * cores  # the first one is run by itself

    @torch.no_grad()
    def plain() -> None:
        model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
            output_attentions=True, output_hidden_states=True,
        )  # fmt: skip

    start = time.perf_counter()
    session = Session(loaded_model(model), lambda *_: None, cache=False)
    opening = time.perf_counter() - start

    def warm() -> None:
        sweep_prompts(session, [prompt], InspectOptions(), lambda *_: None)

    def cold() -> None:
        session._geometries.clear()
        warm()

    def replayed() -> None:
        decomposition = Decomposition()

        def advance(run: BlockRun) -> None:
            decomposition.advance(run)

        session.sweep(prompt, advance)

    def captured() -> None:
        session.sweep(prompt, lambda run: None)

    def shared() -> None:
        among = Processes(cores, lambda *_: None, model)
        assert len(list(sweep_in_order(session, many * [prompt], InspectOptions(), among))) == many

    base, *times, together = interleaved([plain, captured, replayed, warm, cold, shared], runs)
    names = [
        "capture alone",
        "capture and replay",
        "all of inspect, warm Gram cache",
        "all of inspect, cold Gram cache",
    ]
    limits = ["", "", "<= 1.75", "<= 2.4"]
    rows = [Row("plain forward pass with attentions and hidden states", base, "s")]
    rows += [Row(n, t / base, "x plain", lim) for n, t, lim in zip(names, times, limits, strict=True)]
    rows.append(Row(f"each of {many} prompts, {cores} processes", together / many / base, "x plain", "<= 1.75"))
    return [*rows, Row("once a model: fingerprint, discovery and proof", opening / base, "x plain")]
