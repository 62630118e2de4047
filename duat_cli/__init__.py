"""duat: the Dynamic Universal Approximation form of Hugging Face checkpoints, exact and certified.

    import duat_cli as duat

    report = duat.inspect("path/to/checkpoint", prompts=["The cat sat."])
    report.blocks[3].operator.effective_heads

The functions are those of duat_cli/api, loaded when they are first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duat_cli.errors import CheckpointError, DuatError, InputError, UnsupportedModelError

if TYPE_CHECKING:
    from duat_cli.api.comparing import compare, compare_fixed
    from duat_cli.api.files import check, lora_diff, plan
    from duat_cli.api.models import attribute, inspect, matrix, prune_bound, support, verify
    from duat_cli.api.words import explanation, merge, schema

__version__ = "0.2.0"
__all__ = [
    "CheckpointError",
    "DuatError",
    "InputError",
    "UnsupportedModelError",
    "__version__",
    "attribute",
    "check",
    "compare",
    "compare_fixed",
    "explanation",
    "inspect",
    "lora_diff",
    "matrix",
    "merge",
    "plan",
    "prune_bound",
    "schema",
    "support",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A command's function (PEP 562); torch is imported when it is called."""
    if name not in __all__:
        raise AttributeError(f"module 'duat_cli' has no attribute '{name}'")
    from duat_cli.api import comparing, files, models, words

    return getattr(next(module for module in (models, comparing, files, words) if hasattr(module, name)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
