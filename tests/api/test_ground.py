"""What stands around a call: the caller's filters, levels and modes, put back by an error as well."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from duat_cli.api.ground import undisturbed
from duat_cli.loading.model.gpu import full_precision


def test_inside_it_is_quiet_and_gradients_can_be_taken(recwarn: pytest.WarningsRecorder) -> None:
    with torch.inference_mode(), undisturbed():
        warnings.warn("loud", stacklevel=1)
        x = torch.ones(2, requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        assert not logging.getLogger("transformers").isEnabledFor(logging.WARNING)
    assert not recwarn.list


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
