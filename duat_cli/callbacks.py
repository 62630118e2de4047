"""Numbers of `inspect` and `check` during training, for `transformers.Trainer`.

trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
trainer.add_callback(DuatCallback(trainer, every=500, stop=True))
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from duat_cli.analysis.check.given import check_given
from duat_cli.analysis.clock import Clock
from duat_cli.analysis.plan.task import Task
from duat_cli.api.asking import Asked, File, Texts
from duat_cli.api.ground import heard, undisturbed
from duat_cli.api.settings import not_negative, whole_numbers
from duat_cli.checks.nearest import suggestion
from duat_cli.checks.paths import asks_for, flatten, is_known, known_paths, matches
from duat_cli.checks.verdict.conclude import plan
from duat_cli.errors import DuatError, InputError
from duat_cli.loading.texts import PromptText
from duat_cli.results.behaviour import Behaviour
from duat_cli.results.check import CheckReport
from duat_cli.text import one_line, plural

METRICS = ("certificate.relative_error", "behaviour.loss_per_token", "summary.*")
PREFIX = "duat/"
_BEHAVIOUR = "behaviour."

_log = logging.getLogger(__name__)


class DuatCallback(TrainerCallback):
    """Puts chosen numbers of `duat inspect` and `duat check` into the Trainer's log, and can stop a training run.

    duat runs a copy of the model's modules over the same weights, on the first process alone, in the dtype of the
    weights. The model, its gradients, hooks, modes and the random states stay as they are, so training gives the same
    weights as without the callback. A PEFT model is read as its base with the active adapters merged. If duat cannot
    run a model, for example because its weights are on several devices, each look logs a warning ('duat/undecided' in
    the log) and training goes on. With `stop`, the other processes wait for the first one's verdict; otherwise they go
    on.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int | None = None,
        at_save: bool = True,
        prompts: Texts | None = None,
        prompts_file: File | None = None,
        max_tokens: int | None = None,
        chat: bool = False,
        metrics: Sequence[str] = METRICS,
        policy: File | None = None,
        select: Sequence[str] = (),
        stop: bool = False,
        share: float = 0.05,
        tokenizer: Any = None,
    ) -> None:
        """InputError says which argument is wrong.

        trainer: receives the numbers in its log; the callback must be added to it (`trainer.add_callback`).
        every: look every so many optimizer steps; at_save: look wherever the Trainer saves.
        prompts, prompts_file, max_tokens, chat: as for `duat_cli.inspect`; read once.
        metrics: paths of numbers of the inspect report, and `behaviour.` with a field of `duat check`'s, with wildcards
        as in a policy's [bounds]. They are logged as 'duat/' + path, beside 'duat/failed' and 'duat/warned', the counts
        of findings, and 'duat/seconds'. An undefined number is left out.
        policy, select: as for `duat check`; stop: whether a failed check ends the training after this step.
        share: largest share of the time since training began that looks may take. A look that would exceed it, if it
        takes as long as the last one, is left out, and 'duat/skipped' counts it. The first look is always taken.
        tokenizer: default is the trainer's processing_class.
        """
        if not isinstance(trainer, Trainer):
            raise InputError(f"trainer: expected a transformers Trainer, got {type(trainer).__name__}")
        whole_numbers(1, every=every)
        if every is None and not at_save:
            raise InputError("every missing: without at_save there is no step to look at")
        not_negative("share", share)
        for name, given, one in (("metrics", metrics, "summary.*"), ("select", select, "integrity.*")):
            if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(o, str) for o in given):
                raise InputError(f"{name} {one_line(repr(given), 60)}: expected a list of texts, such as ['{one}']")
        for pattern in metrics:
            _refuse_unknown(pattern)
        self._plan = plan(None if policy is None else str(policy), list(select), None, False, False, "float32")
        self._trainer, self._every, self._at_save = trainer, every, at_save
        self._tokenizer = tokenizer if tokenizer is not None else trainer.processing_class
        if self._tokenizer is None:
            raise InputError("tokenizer missing: the trainer has no processing_class; give one")
        self._asked = Asked(trainer.model, self._tokenizer, prompts, prompts_file, max_tokens, chat=chat)
        self._texts: list[PromptText] = self._asked.texts.read(heard(None))
        self._asked.refuse_unfit(self._texts)
        self._metrics, self._stop, self._share = tuple(metrics), stop, share
        self._began: float | None = None
        self._last: int | None = None
        self.spent = 0.0
        """Seconds that all looks have taken so far."""
        self.cost: float | None = None
        """Seconds that the last look took; None before the first."""
        self.skipped = 0
        """Number of looks that were left out because of `share`."""
        self.report: CheckReport | None = None
        """Report of the last look; on the first process alone."""

    # -- the Trainer's events ------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._began, self._last, self.spent = time.monotonic(), None, 0.0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self._every is not None and state.global_step % self._every == 0:
            self._look(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self._at_save:
            self._look(state, control)

    # -- a look ----------------------------------------------------------------------------------------------------

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        """Takes at most one look a step, whichever event asks for it. Every process comes here at the same steps."""
        if self._last == state.global_step:
            return
        self._last = state.global_step
        failed = False
        if state.is_world_process_zero:
            wanted = control.should_log, control.should_evaluate, control.should_save
            failed = self._within_budget(state.global_step)
            # logging resets `should_log`
            control.should_log, control.should_evaluate, control.should_save = wanted
        if self._stop:
            [failed] = broadcast_object_list([failed])  # a process that went on alone would wait forever
            if failed:
                control.should_training_stop = True

    def _within_budget(self, step: int) -> bool:
        """Takes a look if `share` allows it. Returns whether a check failed; False where that is not known."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if self.cost is not None and self.spent + self.cost > self._share * (now - self._began):
            self.skipped += 1
            _log.info(
                "duat: step %d: no look: %.1f s are spent and one takes %.1f s, more than share=%g of %.1f s",
                step, self.spent, self.cost, self._share, now - self._began,
            )  # fmt: skip
            self._tell({"skipped": float(self.skipped)})
            return False
        try:
            numbers, failed = self._numbers(step)
        except Exception as fault:  # a missing number must not end days of training
            reason = str(fault) if isinstance(fault, DuatError) else f"{type(fault).__name__}: {fault}"
            _log.warning("duat: step %d: could not tell: %s", step, one_line(reason))
            numbers, failed = {"undecided": 1.0}, False
        self.cost = time.monotonic() - now
        self.spent += self.cost
        self._tell({**numbers, "seconds": round(self.cost, 3)})
        return failed

    def _numbers(self, step: int) -> tuple[dict[str, float], bool]:
        """The numbers to log, and whether a check failed."""
        clock = Clock()
        also = {option for pattern in self._metrics for option in asks_for(pattern)}
        with undisturbed():
            asked = replace(self._asked, model=self._trainer.model)  # a Trainer may replace its model
            opened = asked.open(Task("check"), heard(None), self._texts)
            found, report = check_given(
                self._plan, opened.loaded, opened.prompts, opened.tokenizer, heard(None), clock.run, also
            )
        self.report = found
        values = dict(flatten(report)[0]) if report is not None else {}
        if found.behaviour is not None:
            values |= {f"{_BEHAVIOUR}{name}": value for name, value in flatten(found.behaviour)[0].items()}
        numbers = {path: value for path, value in values.items() if any(matches(p, path) for p in self._metrics)}
        failed = found.verdict == "failed"
        if failed:
            first = next(cause for cause in found.causes if cause.status == "failed")
            more = "; training stops" if self._stop else ""
            _log.warning(
                "duat: step %d: %s failed, first %s: %s%s",
                step, plural(found.counts.failed, "check"), first.rules[0], one_line(first.message), more,
            )  # fmt: skip
        return {**numbers, "failed": float(found.counts.failed), "warned": float(found.counts.warned)}, failed

    def _tell(self, numbers: Mapping[str, float]) -> None:
        """Writes the numbers to the Trainer's log, which TensorBoard and others read. A derived trainer, such as TRL's,
        may add means of its metrics to what it logs, and clear them; so `Trainer.log` itself is called, and the means
        are kept for the trainer's own entries."""
        entry = {f"{PREFIX}{name}": value for name, value in numbers.items() if math.isfinite(value)}
        Trainer.log(self._trainer, entry)


def _refuse_unknown(pattern: str) -> None:
    fields = [f"{_BEHAVIOUR}{name}" for name in Behaviour.model_fields]
    if not is_known(pattern) and not any(matches(pattern, field) for field in fields):
        known = [path.replace("#", "*") for path in known_paths()]
        groups = dict.fromkeys(f"{path.partition('.')[0]}.*" for path in known)
        nearest = suggestion(pattern, [*known, *fields, *groups])
        raise InputError(f"metrics '{pattern}': no report has such a number{nearest}")
