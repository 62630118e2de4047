"""What stands around a call: the caller's filters, levels and modes, put back by an error as well."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import warnings

import numpy
import pytest
import torch

from duat_cli.api.ground import undisturbed
from duat_cli.loading.model.gpu import full_precision
from duat_cli.loading.quiet import hushed


def test_inside_it_is_quiet_and_gradients_can_be_taken(recwarn: pytest.WarningsRecorder) -> None:
    with torch.inference_mode(), undisturbed():
        warnings.warn("loud", stacklevel=1)
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        assert not logging.getLogger("transformers").isEnabledFor(logging.WARNING)
    assert not recwarn.list


def test_numbers_are_of_the_models_own_dtype_and_device() -> None:
    x = torch.ones(2, 2)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            with undisturbed():
                assert (x @ x).dtype == torch.float32
                assert torch.ones(1).device.type == "cpu"
                assert torch.ones(1).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
            assert torch.ones(1).device.type == "meta"
            assert torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_wait_for_each_other_and_leave_the_process_as_it_was() -> None:
    """Streams, filters and levels are the process's: put back out of turn, they would stay changed."""
    before = sys.stdout, list(warnings.filters), logging.getLogger("transformers").level
    inside, most = 0, 0

    def call() -> None:
        nonlocal inside, most
        for _ in range(20):
            with undisturbed(), hushed():
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert (sys.stdout, list(warnings.filters), logging.getLogger("transformers").level) == before


def test_an_error_leaves_nothing_behind() -> None:
    filters, level = list(warnings.filters), logging.getLogger("transformers").level
    with torch.no_grad():
        with pytest.raises(ValueError, match="x"), undisturbed():
            raise ValueError("x")
        assert not torch.is_grad_enabled()
    assert list(warnings.filters) == filters
    assert logging.getLogger("transformers").level == level


@pytest.mark.parametrize("short", [True, False])
def test_convolutions_of_the_caller_stay_as_they_were(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", short)
    with undisturbed():
        full_precision()
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 is short


def test_random_numbers_that_are_drawn_inside_are_not_missed_outside() -> None:
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with undisturbed():
        random.random()
        numpy.random.rand()
        torch.rand(1)
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
