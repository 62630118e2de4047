"""What is asked of torch about GPUs, which are not here: processes share them, and what a run takes of one."""

from __future__ import annotations

import pytest
import torch

from duat_cli.loading.model.gpu import full_precision, give_back_gpu_memory, peak_gpu_memory, use_gpu


@pytest.mark.parametrize(("count", "number", "taken"), [(4, 2, [2]), (2, 5, [1]), (0, 3, [])])
def test_gpus_are_shared(count: int, number: int, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    use_gpu(number)
    assert found == taken


def test_convolutions_keep_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    full_precision()
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
