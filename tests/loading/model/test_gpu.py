"""What is asked of torch about GPUs, which are not here: processes share them, and what a run may take of one."""

from __future__ import annotations

import pytest
import torch

from duat_cli.loading.model.gpu import give_back_gpu_memory, peak_gpu_memory, prepare_gpu, use_gpu


@pytest.mark.parametrize(("count", "number", "taken"), [(4, 2, [2]), (2, 5, [1]), (0, 3, [])])
def test_gpus_are_shared(count: int, number: int, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    use_gpu(number)
    assert found == taken


@pytest.mark.parametrize(
    ("memory", "shares"), [(None, []), (6 << 30, [(0.25, "cuda:0")]), (99 << 30, [(1.0, "cuda:0")])]
)
def test_a_run_takes_what_it_may_and_computes_in_float32(
    memory: int | None, shares: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 24 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append((share, device))
    )
    prepare_gpu("cuda:0", memory)
    assert found == shares
    assert not torch.backends.cudnn.allow_tf32


def test_only_a_gpu_has_memory_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    give_back_gpu_memory("cpu")
    assert not given
    give_back_gpu_memory("cuda:1")
    assert given == ["back"]


def test_the_peak_is_what_torch_has_had_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {"cuda:1": 5}.__getitem__)
    assert peak_gpu_memory("cuda:1") == 5
