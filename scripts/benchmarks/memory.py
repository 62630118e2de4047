"""Peak memory of `inspect` and of `attribute`."""

from __future__ import annotations

import json
import time

from benchmarks.common import Row, llama_shape, loaded_model, peak, random_prompt


def memory(runs: int) -> list[Row]:
    """Each figure in a process of its own, since peak memory never goes down."""
    shallow, deep = (peak("inspect", blocks, 512) for blocks in (10, 30))
    long = peak("inspect", 30, 2048)
    grown = _grown(shallow, deep)
    back = [peak("attribute", blocks, 512) for blocks in (10, 30)]
    stored = (back[1]["stored"] - back[0]["stored"]) / 2**20
    return [
        Row("peak beyond the model, 10 blocks, 512 tokens", (shallow["peak"] - shallow["model"]) / 2**20, "MiB"),
        Row("peak beyond the model, 30 blocks, 512 tokens", (deep["peak"] - deep["model"]) / 2**20, "MiB"),
        Row("growth for 20 more blocks", grown / 2**20, "MiB", "about 0"),
        Row("peak of the process at 2048 tokens, model and libraries included", long["peak"] / 2**30, "GiB", "<= 2"),
        Row("inspect at 2048 tokens", long["seconds"], "s"),
        Row(
            "attribute, peak beyond the model, 10 blocks, 512 tokens",
            (back[0]["peak"] - back[0]["model"]) / 2**20,
            "MiB",
        ),
        Row("attribute, growth for 20 more blocks", _grown(*back) / 2**20, "MiB", f"about {stored:.0f}, their inputs"),
    ]


def _grown(shallow: dict[str, float], deep: dict[str, float]) -> float:
    """Bytes beyond the model."""
    return (deep["peak"] - deep["model"]) - (shallow["peak"] - shallow["model"])


def child(blocks: int, tokens: int) -> None:
    from duat_cli.analysis.inspect.options import InspectOptions
    from duat_cli.analysis.inspect.run import inspect

    model = llama_shape(blocks)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    start = time.perf_counter()
    report = inspect(loaded_model(model), [random_prompt(49152, tokens)], InspectOptions(cache=False), lambda *_: None)
    spent = time.perf_counter() - start
    print(json.dumps({"peak": report.run.peak_memory_bytes, "model": size, "seconds": spent}))


def attribute_child(blocks: int, tokens: int) -> None:
    """What the inputs of all blocks take stands beside the peak: they are kept for the way back."""
    from benchmarks.attribute import Numbers
    from duat_cli.analysis.attribute.run import AttributeOptions, attribute
    from duat_cli.analysis.attribute.targets import Words
    from duat_cli.compat.libc import return_freed_memory

    return_freed_memory()  # as the command does
    model = llama_shape(blocks).requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    prompt = random_prompt(49152, tokens)
    report = attribute(loaded_model(model), [prompt], Words(Numbers()), AttributeOptions(), lambda *_: None)
    assert report.certificate.exact
    stored = blocks * tokens * model.config.hidden_size * model.dtype.itemsize
    print(json.dumps({"peak": report.run.peak_memory_bytes, "model": size, "stored": stored}))
