"""`verify` says of every block what `inspect` says of how exact it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from duat_cli.analysis.inspect.options import InspectOptions
from duat_cli.analysis.inspect.run import inspect
from duat_cli.analysis.inspect.verify import verify
from duat_cli.loading.model.load import LoadedModel, load
from duat_cli.loading.prompts import Prompt

Encoded = Callable[..., list[Prompt]]
TEXTS = ("Nui zi created Nui zi dynamics", "def f(x):", "one two three one two")


def test_verify_agrees_with_inspect(checkpoint: Path, loaded: LoadedModel, prompts: Encoded) -> None:
    report = inspect(loaded, prompts(loaded, *TEXTS), InspectOptions(), lambda *_: None)
    again = load(str(checkpoint))
    checked = verify(again, prompts(again, *TEXTS), lambda *_: None)
    assert checked.certificate == report.certificate
    assert [b.certificate_error for b in checked.blocks] == [b.certificate_error for b in report.blocks]
    assert [b.operator_error for b in checked.blocks] == [b.operator.certificate_error for b in report.blocks]
