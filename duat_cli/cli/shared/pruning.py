"""Options of `duat prune-bound`, some of which `duat plan` takes: the terms that may go, and the sets to choose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from duat_cli.cli.shared import options
from duat_cli.cli.shared.grouped import Options
from duat_cli.errors import InputError
from duat_cli.kinds import Effort, MetricName, apart

if TYPE_CHECKING:
    from duat_cli.analysis.plan.task import PruneOptions


class Pruning(Options):
    """What `duat prune-bound` reads and computes."""

    prompt: list[str] | None = options.Texts.prompt
    prompts: str | None = options.Texts.prompts
    holdout: str | None = options.input_option(
        metavar="FILE|SHARE",
        help="Prompts that test the chosen sets and play no part in choosing: a file, or a share of the prompts such "
        "as 0.5. Default: a bundled set, if the prompts are the bundled ones too.",
    )
    max_tokens: int | None = options.Texts.max_tokens
    chat: bool = options.Texts.chat
    granularity: str | None = options.compute_option(
        metavar="LIST",
        help="What may be removed: neuron, head, expert, ffn, attention, block. Several with commas, such as "
        "neuron,head, go into one set, ordered by damage for each parameter, if none is a part of another. Default: "
        "whatever the model has, with a set for each kind.",
    )
    metric: MetricName | None = options.compute_option(
        metavar="METRIC",
        help="Damage: hidden (relative change of the final hidden states), kl (nats, of the distribution over next "
        "tokens, or over a classifier's classes), or nll (change of the loss). Default: kl if the model has such a "
        "head, else hidden.",
    )
    effort: Effort = options.compute_option(
        "default",
        metavar="HOW",
        help="quick: fewer probes, ablations and tested sets, prompts that choose sets cut to 384 tokens together (by "
        "default 768), no certified bounds. thorough: more of each. --probes and --measure override it.",
    )
    probes: int | None = options.compute_option(
        metavar="K",
        min=2,
        help="How many random directions of the output are carried back for every prompt. Default: 32.",
    )
    measure: int | None = options.compute_option(
        metavar="N",
        min=0,
        help="How many terms of every kind are really ablated: all if there are no more, else a random sample; four "
        "times as many whole parts. Default: 16.",
    )
    budget: float = options.compute_option(0.1, metavar="X", help="Largest damage allowed, in the metric's unit.")
    ablate: Literal["zero", "mean"] = options.compute_option(
        "zero",
        metavar="HOW",
        help="What stands in for a removed term: zero, or the mean of its activations over the prompts.",
    )
    remove: str | None = options.compute_option(
        metavar="SHARE",
        help="Remove the set that holds this share of the blocks' parameters, such as 20%, or of all the model's: "
        "20%/all. It replaces the largest set within the budget.",
    )
    criteria: bool = options.compute_option(
        help="Also run, on the held-out prompts, the sets that other criteria would remove (magnitude, Wanda, Taylor, "
        "ShortGPT), and 5 random sets, with as many parameters as the chosen set and the middle one of those tested. "
        "It takes up to 28 more passes of every held-out prompt for each kind."
    )
    rounds: int = options.compute_option(
        1,
        metavar="K",
        min=1,
        help="Remove the set in K parts, sketch the model again after each, and show what that gains over one round.",
    )
    uniform: bool = options.compute_option(
        help="Sets take the same number of neurons from every FFN, and of key and value heads, with the heads that "
        "use them, from every attention: then all of them can leave the file, if its config can state "
        "what is left."
    )
    repair: bool = options.compute_option(
        help="Refit what is left by least squares to the dense model's outputs. Budget, guarantee and --apply then "
        "refer to the repaired model."
    )
    calibration: str | None = options.input_option(
        metavar="FILE",
        help="Prompts that --repair fits to, in the forms of --prompts. Default: the prompts of the report.",
    )
    confidence: float = options.compute_option(
        0.95, metavar="P", help="Confidence of every interval and of the guarantee."
    )
    exceed: float = options.compute_option(
        0.1,
        metavar="SHARE",
        help="The guarantee says that at most this share of prompts has a damage above the budget.",
    )
    out: str | None = options.OUT

    def settings(self) -> PruneOptions:
        """The options, parsed. Raises InputError for senseless values, and for options that contradict each other."""
        from duat_cli.analysis.plan.task import PruneOptions, effort_of
        from duat_cli.api.settings import kinds_of

        kinds = kinds_of(self.granularity)
        require_repair(self.calibration, self.repair)
        remove, of_all = parse_remove(self.remove)
        probes, measure = effort_of(self.effort, self.probes, self.measure)
        return PruneOptions(
            kinds=kinds, metric=self.metric, probes=probes, measure=measure, budget=self.budget,
            confidence=self.confidence, exceed=self.exceed, ablate_mean=self.ablate == "mean", uniform=self.uniform,
            repair=self.repair, joint=apart(kinds), remove=remove, of_all=of_all, rounds=self.rounds,
            criteria=self.criteria, effort=self.effort, whole=self.out is not None,
        )  # fmt: skip


def parse_remove(text: str | None) -> tuple[float | None, bool]:
    """The share of --remove, and whether it is a share of all parameters."""
    if text is None:
        return None, False
    share, _, whole = text.strip().partition("/")
    try:
        value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if whole not in ("", "all") or text.strip().endswith("/") or not 0 < value < 1:
        raise InputError(
            f"--remove '{text}': expected a share of the blocks' parameters such as 20%, or of all: 20%/all"
        )
    return value, whole == "all"


def require_repair(calibration: str | None, repair: bool) -> None:
    """Raises InputError for --calibration without --repair."""
    if calibration is not None and not repair:
        raise InputError("--calibration: says what --repair is fitted to; give --repair as well")
