"""Processes share the GPUs that there are; without any nothing is set."""

from __future__ import annotations

import pytest
import torch

from duat_cli.loading.model.gpu import use_gpu


@pytest.mark.parametrize(("count", "number", "taken"), [(4, 2, [2]), (2, 5, [1]), (0, 3, [])])
def test_gpus_are_shared(count: int, number: int, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    use_gpu(number)
    assert found == taken
