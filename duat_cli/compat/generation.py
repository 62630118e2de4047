"""Generation of transformers: known to work with 5.10.1 and 5.24.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def generation_defaults() -> dict[str, Any]:
    """Every field of generation -> the value that transformers uses where generation_config.json does not state it.
    Without the defaults, a file that states them differs from one that does not."""
    from transformers import GenerationConfig

    plain = GenerationConfig()
    defaults = getattr(plain, "_get_default_generation_params", dict)
    return {name: None for name in vars(plain) if not name.startswith("_")} | defaults()


def generation_fault(stated: Mapping[str, Any]) -> str | None:
    """Why transformers refuses the fields of generation_config.json, and so the model beside it; None where it accepts
    them. Without it, such a checkpoint passes, because only its weights are read here."""
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(stated)).validate()
    except (ValueError, TypeError) as fault:
        return str(fault)
    return None


def sampling_fault(stated: Mapping[str, Any]) -> str | None:
    """The first of these fields that `generate` refuses, and why; None where it accepts them all. Fields of sampling
    count only if the file turns sampling on. `GenerationMixin._get_logits_processor` decides which values are used at
    all. Without it, a checkpoint passes that loads but cannot generate."""
    from transformers.generation import logits_process as made

    processors: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
        "repetition_penalty": (made.RepetitionPenaltyLogitsProcessor, lambda value: value != 1.0)
    }
    if stated.get("do_sample"):
        processors |= {
            "temperature": (made.TemperatureLogitsWarper, lambda value: value != 1.0),
            "top_k": (made.TopKLogitsWarper, lambda value: value != 0),
            "top_p": (made.TopPLogitsWarper, lambda value: value < 1.0),
            "min_p": (made.MinPLogitsWarper, lambda value: True),
            "typical_p": (made.TypicalLogitsWarper, lambda value: value < 1.0),
        }
    for name, (processor, used) in processors.items():
        value = stated.get(name)
        try:
            if value is not None and used(value):
                processor(value)
        except (ValueError, TypeError) as fault:
            return f"{name}: {fault}"
    return None
