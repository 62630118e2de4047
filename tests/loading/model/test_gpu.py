"""What is asked of torch about GPUs, which are not here: processes share them, and what a run takes of one."""

from __future__ import annotations

import pytest
import torch

from duat_cli.analysis.clock import Clock
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.given import given
from duat_cli.loading.model.gpu import full_precision, give_back_gpu_memory, lacks_float64, peak_gpu_memory, use_gpu
from duat_cli.loading.model.load import parse_device
from duat_cli.zoo import tiny


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
    assert peak_gpu_memory("cpu") is None
    run = Clock().run(7, device="cuda:1")
    assert (run.gpu_memory_bytes, run.planned_memory_bytes, run.reasons) == (5, 7, {})
    assert Clock().run(7).reasons == {"gpu_memory_bytes": "no CUDA device computed"}


def test_cuda_is_the_gpu_of_this_process_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    monkeypatch.setattr(torch, "empty", lambda *_, dtype, device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse_device("cuda") == parse_device("auto") == torch.device("cuda", 2)
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    assert parse_device("cpu") == torch.device("cpu")


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    model = tiny.tiny_model("llama")
    assert not lacks_float64(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(InputError, match=r"^--device 'cpu': has no float64, which sums .*; use --device cpu$"):
            parse_device("cpu")
        with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: cpu has no float64.*model\.to\('cpu'\)$"):
            given(model)
    assert given(model).device == "cpu"
