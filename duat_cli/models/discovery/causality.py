"""The head of a model: whether it predicts the next token, or classes, found by what it does, because its class does
not tell (`is_decoder`). Also its logits for an output that its stack has given already, without a second pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from duat_cli.compat.transformers import encoder_output, stated
from duat_cli.errors import UnsupportedModelError
from duat_cli.models.arrays import relative_error, wide
from duat_cli.models.discovery.modality import (
    DISCOVERY_TOKENS,
    STATES,
    Given,
    for_decoder,
    is_pair,
    of_libraries,
    part_reading,
    probe_inputs,
    stack_of,
)
from duat_cli.models.discovery.structure import run_stack
from duat_cli.models.instrument.calls import taken_by
from duat_cli.models.instrument.hooks import patched

Classes = Literal["text", "token"]
"""The item that a classifier gives a class to: its whole input, or each token."""
OF_TEXTS = "ForSequenceClassification", "ForTokenClassification"
SEEN = "ForImageClassification", "ForImageClassificationWithTeacher", "ForVideoClassification", "ForAudioClassification"
"""Class names of classifiers of pictures, videos and sound, which are run whole for their logits."""
KEPT = DISCOVERY_TOKENS // 2  # tokens in front of those that are changed
LOGITS_BYTES = 256 << 20  # most bytes of logits in memory at once, if the model can compute those of some tokens alone


class HeadTest:
    """Two short passes that test the head of a model. They show whether `logits` are over its vocabulary for every
    token that it reads, and, because all tokens behind the first few are changed, whether logits depend on later
    tokens.

    A classifier needs one pass, which shows that its logits are over its classes. Of models of pictures and sound,
    which have no next token, only classifiers are tested. A class that shows that there is no such head needs no pass.
    """

    def __init__(
        self, model: Any, stack: Any, device: str | None = None, like: Mapping[str, Tensor] | None = None
    ) -> None:
        """device, like: as in `probe_inputs`. model: for a decoder's `stack` the encoder-decoder, whose head it has."""
        self._name, self._dtype = type(model).__name__, model.dtype
        decodes = for_decoder(like)
        self._pair, self._labels = is_pair(model) and not decodes, is_classifier(model, stack)
        self._texts = like is None or "input_ids" in like  # pictures within a text stand among its tokens
        self._writes = bool(getattr(model, "can_generate", bool)())  # such as BLIP, whose decoder has the head
        self.passes: list[LogitsPass] = []
        if self._labels and class_count(model):
            self.passes = [LogitsPass(model, probe_inputs(stack, like, DISCOVERY_TOKENS, device))]
        elif self._texts and _may_have_head(model, stack, decodes=decodes):
            probe = probe_inputs(stack, like if decodes else None, DISCOVERY_TOKENS, device)
            self.passes = [LogitsPass(model, probe), LogitsPass(model, _changed_behind(probe))]

    @property
    def exists(self) -> bool:
        """Whether there is a head, once the passes have run."""
        return bool(self.passes) and all(one.found is not None for one in self.passes)

    @property
    def classes(self) -> Classes | None:
        """The item that the model predicts a class of, once the pass has run; None where it predicts no classes."""
        found = [one.classes for one in self.passes if one.classes is not None]
        return ("text" if found[0].shape[1] == 1 else "token") if found else None

    @property
    def predicts(self) -> bool:
        """Whether it gives a distribution over tokens or classes, once the passes have run."""
        return self.exists or self.classes is not None

    @property
    def finite(self) -> bool:
        """Whether all its logits are finite, once the passes have run."""
        return all(bool(one.found.isfinite().all()) for one in self.passes if one.found is not None)

    @property
    def causal(self) -> bool:
        """Whether no token's logits depend on a later token."""
        before, after = (one.found[:, :KEPT] for one in self.passes if one.found is not None)
        return unmoved(before, after, self._dtype)

    def why_no_next_token(self) -> str | None:
        """Why the model's logits are not those of the next token; None where they are."""
        if self._pair:
            return f"{self._name} writes with its decoder, and what is read here is its encoder"
        if not self.exists:
            return f"{self._name} is no next-token model: {self._instead}"
        if not self.finite:
            return f"{self._name} gives logits that are not finite"
        if not self.causal:
            return f"{self._name} is no next-token model: its outputs move with later tokens"
        return None

    @property
    def _instead(self) -> str:
        """The text on what a model without an LM head gives."""
        if self.classes is not None:
            return f"it predicts the class of a {self.classes if self._texts else 'picture or a sound'}"
        if self._labels:
            return "it gives no distribution over classes"
        if not self._texts:
            return "it is no classifier of a picture or a sound"
        return "the LM head of a part of it is not read" if self._writes else "it has no LM head"


def unmoved(before: Tensor, after: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits in front of tokens that were changed stay the same up to rounding. dtype: that of the model.

    In causal models they move by at most 3e-7 in float32 and 0 in bfloat16 (experts compute in batches of other
    sizes), in untrained encoders by at least 8e-4.
    """
    return relative_error(wide(after), wide(before)) <= max(1e-5, 0.5 * torch.finfo(dtype).eps)


class LogitsPass:
    """A pass that keeps logits, if the model gives any: of the tokens `rows` (None: all), (1, tokens, vocabulary).

    The logits of a classifier go to `classes`: (1, 1, classes) of a text or (1, tokens, classes) of its tokens.
    """

    def __init__(self, model: Any, given: Given, rows: slice | None = None) -> None:
        self._model, self._given, self._rows = model, given, rows
        ids = given if isinstance(given, Tensor) else given.get("input_ids")
        self._shape = None if ids is None else ids.shape
        self.found: Tensor | None = None
        self.classes: Tensor | None = None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()

    def run(self) -> None:
        logits = logits_in(run_headed(self._model, self._given))
        if logits is None:
            return
        if logits.shape[:-1] == self._shape and over_tokens(self._model, logits):
            self.found = logits if self._rows is None else logits[:, self._rows].clone()
        elif class_count(self._model) == logits.shape[-1] and logits.shape[:-1] in (self._shape, (1,)):
            self.classes = by_row(logits)


def logits_in(output: Any) -> Tensor | None:
    """The logits in a model's output; of a class for pretraining, which has several heads, those over its vocabulary.
    None where it has none."""
    named = (getattr(output, name, None) for name in ("logits", "prediction_logits"))
    return next((logits for logits in named if isinstance(logits, Tensor)), None)


def head_output(model: Any, given: Given) -> Tensor:
    """The logits of a model with a head, (B, N, vocabulary) or (B, classes)."""
    logits = logits_in(run_headed(model, given))
    if logits is None:
        raise UnsupportedModelError(f"{type(model).__name__} puts out no logits")
    return logits


def by_row(logits: Tensor) -> Tensor:
    """Logits with an axis of tokens: (B, N, V) as they are, and (B, classes), one row per text, as (B, 1, classes)."""
    return logits if logits.ndim == 3 else logits[:, None]


def is_classifier(model: Any, stack: Any) -> bool:
    """Whether a model gives scores of labels for each text or token; `class_count` says whether as a distribution.

    The name of its class decides, because a class for choices or answers may not read a prompt as it is.
    """
    name = type(model).__name__
    return name.endswith(SEEN) or (name.endswith(OF_TEXTS) and model is not stack and not is_pair(model))


def why_no_classes(model: Any) -> str | None:
    """The reason why a classifier, whatever it reads, gives no distribution over its classes; None where it gives one,
    and for a model that is no classifier."""
    if not type(model).__name__.endswith((*OF_TEXTS, *SEEN)) or is_pair(model) or class_count(model):
        return None
    if stated(model.config, "problem_type") == "multi_label_classification":
        return "its labels may hold together: it gives no distribution over classes"
    return "it gives numbers, no distribution over classes"


def class_count(model: Any) -> int:
    """How many classes the model gives one distribution over; 0 where it gives none, such as a regression or a model
    whose labels may hold together."""
    labels = getattr(model.config, "num_labels", 0)  # of the whole model; its parts (CLIP's) may state others
    apart = getattr(model.config, "problem_type", None) in (None, "single_label_classification")
    return labels if apart and labels > 1 else 0


def _may_have_head(model: Any, stack: Any, *, decodes: bool) -> bool:
    if getattr(model.config, "is_encoder_decoder", False) and not decodes:
        return False
    if model is stack:  # a custom class may hold blocks and head; transformers' classes have a model for the blocks
        return not of_libraries(model)
    return hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None


def _changed_behind(given: Given) -> Given:
    """The input with other tokens behind the first `KEPT`."""
    ids = given if isinstance(given, Tensor) else given["input_ids"]
    other = torch.cat([ids[:, :KEPT], ids[:, : DISCOVERY_TOKENS - KEPT]], dim=1)
    return other if isinstance(given, Tensor) else {**given, "input_ids": other}


def over_tokens(model: Any, logits: Tensor) -> bool:
    """Whether logits of tokens are over the vocabulary, not over labels. Without a declared head the width decides."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None or logits.shape[-1] >= (stated(model.config, "vocab_size") or 0) > 0


@torch.no_grad()
def probe_output(model: Any, like: Mapping[str, Tensor] | None = None) -> Tensor:
    """The output of a model for the tokens that discovery reads: logits, or hidden states; of an encoder-decoder the
    output of the part that reads inputs like these. like: as in `probe_inputs`."""
    stack = part_reading(model, like)
    found: Tensor = run_stack(stack, probe_inputs(stack, like, DISCOVERY_TOKENS))[0]
    return found


def head_of(model: Any, stack: Any, like: Mapping[str, Tensor] | None = None) -> HeadTest:
    """The head test of a model, with its passes run. like: as in `HeadTest`."""
    found = HeadTest(model, stack, like=like)
    for one in found.passes:
        with one.active():
            one.run()
    return found


def head_logits(model: Any, stack: Any, output: Any, given: Given) -> Iterator[tuple[int, Tensor]]:
    """Yields (first token, logits (tokens, vocabulary)) for a prompt, token ids (1, N) or inputs by name with
    `input_ids` among them, piece by piece; of a classifier one piece, (0, logits (1 or N, classes)).

    output: the output of `stack` for the prompt. The model's own forward runs with it in place of a pass of the stack.
    A model that runs its blocks without a call of `stack` runs them again, with the same result.
    """
    tokens = (given if isinstance(given, Tensor) else given["input_ids"]).shape[1]
    step = _tokens_at_once(model, tokens) if isinstance(given, Tensor) else tokens
    with patched(stack, lambda *_call: output):
        for start in range(0, tokens, step):
            with torch.no_grad():
                found = _logits(model, given, start, min(start + step, tokens), tokens)
            yield start, found


def class_logits(model: Any, stack: Any, output: Any, given: Mapping[str, Tensor]) -> Tensor | None:
    """Logits (1 or N, classes) of a classifier by its own head, also where it reads more than token ids; None for any
    other model.

    output: the output of `stack` for `given`, as in `head_logits`. given: the inputs, by name.
    """
    if not type(model).__name__.endswith((*OF_TEXTS, *SEEN)) or is_pair(model):
        return None
    with patched(stack, lambda *_call: output), torch.no_grad():
        logits = getattr(model(**given), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or logits.shape[-1] != class_count(model):
        return None
    return by_row(logits)[0]


def decoder_logits(pair: Any, decoder: Any, output: Any, given: Mapping[str, Tensor]) -> Tensor | None:
    """Logits (N, vocabulary) by the head of an encoder-decoder; None where it has no head over its tokens.

    output: the output of the decoder's stack for `given`: its tokens, (1, N), and the encoder's states.
    """
    try:
        with patched(stack_of(decoder), lambda *_call: output), torch.no_grad():
            logits = getattr(run_pair(pair, given), "logits", None)
    except UnsupportedModelError:
        return None
    return logits[0] if isinstance(logits, Tensor) and logits.shape[:-1] == given["input_ids"].shape else None


def run_headed(model: Any, given: Given) -> Any:
    """The output of a model with its head; of an encoder-decoder that is given its encoder's states, by its decoder."""
    return run_pair(model, given) if for_decoder(given) and is_pair(model) else run_stack(model, given)


def run_pair(pair: Any, given: Mapping[str, Tensor]) -> Any:
    """The output of an encoder-decoder for its encoder's states and its decoder's tokens. Raises UnsupportedModelError
    where its head takes more, such as the encoder's tokens (a classifier looks for the last of them)."""
    states = encoder_output(given[STATES])
    try:
        return pair(encoder_outputs=states, decoder_input_ids=given["input_ids"], use_cache=False)
    except (AttributeError, TypeError, ValueError) as fault:
        name = type(pair).__name__
        raise UnsupportedModelError(
            f"{name}: its head takes more than its encoder's states and its decoder's tokens; duat inspect and verify "
            "read its blocks"
        ) from fault


def _tokens_at_once(model: Any, tokens: int) -> int:
    if "logits_to_keep" not in taken_by(model.forward):
        return tokens
    width = model.get_output_embeddings().weight.shape[0] * model.dtype.itemsize
    return int(max(1, min(tokens, LOGITS_BYTES // width)))


def _logits(model: Any, given: Given, start: int, stop: int, tokens: int) -> Tensor:
    if (start, stop) == (0, tokens) or not isinstance(given, Tensor):
        return by_row(head_output(model, given))[0]
    kept = torch.arange(start, stop, device=given.device)
    some: Tensor = model(
        input_ids=given, attention_mask=torch.ones_like(given), use_cache=False, logits_to_keep=kept
    ).logits[0]
    return some
