"""An architecture without its training: a model's class built again from its config, and random tokens.

A random model's statistics do not depend on the text, only on how many tokens it has.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duat_cli.compat.transformers import eager_model

SEED = 20260101
FIRST_ORDINARY_ID = 10  # special ids that the config does not state are usually among the first


def bytes_of(model: Any) -> int:
    """Bytes of a second model like this one."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def reinitialised(model: Any) -> Any:
    """A model of the same class, config, dtype and device with transformers' own initialisation, by a fixed seed."""
    with seeded():
        fresh = eager_model(type(model), copy.deepcopy(model.config), model.dtype)
    fresh.requires_grad_(False)
    return fresh.eval().to(model.device)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """While active, random numbers come from a fixed seed; afterwards generators go on as if none was drawn."""
    own, numbers, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # that of the CPU alone: torch.manual_seed would seed every device
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(numbers)
        torch.set_rng_state(tensors)


def random_ids(config: Any, tokens: int) -> Tensor:
    """Random token ids, none of them special, (1, tokens); a shorter sequence is the beginning of a longer one."""
    text = config.get_text_config()
    ordinary = torch.ones(text.vocab_size, dtype=torch.bool)
    ordinary[: min(FIRST_ORDINARY_ID, text.vocab_size - 1)] = False
    special = [i for i in _special_ids(config) | _special_ids(text) if 0 <= i < text.vocab_size]
    ordinary[special] = False
    choice = ordinary.nonzero()[:, 0] if bool(ordinary.any()) else torch.arange(text.vocab_size)
    places = torch.randint(len(choice), (1, tokens), generator=torch.Generator().manual_seed(SEED))
    return choice[places]


def _special_ids(config: Any) -> set[int]:
    found: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found
