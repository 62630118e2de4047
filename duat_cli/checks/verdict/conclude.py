"""From evidence to the report: rules are judged, and the baseline compared or renewed."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from duat_cli import __version__
from duat_cli.checks import baseline as baselines
from duat_cli.checks.answers import Agreement, agreement, compared
from duat_cli.checks.baseline import Baseline, BaselineFile, Value
from duat_cli.checks.drift import Deviation, by_rounding, compare, refuse_foreign, refuse_other_model, retokenised
from duat_cli.checks.metrics import metrics_of, sampling_slack
from duat_cli.checks.nearest import suggestion
from duat_cli.checks.paths import is_metric, leaves_out, matches
from duat_cli.checks.policy import Policy, read_policy
from duat_cli.checks.registry import settings_of
from duat_cli.checks.rule import Evidence, Need, Settings
from duat_cli.checks.tolerances import COARSENESS
from duat_cli.checks.verdict.causes import grouped
from duat_cli.checks.verdict.judge import judge
from duat_cli.checks.verdict.locate import Locator
from duat_cli.errors import InputError, needed
from duat_cli.loading.checkpoint.dtypes import RUN_IN, SHORT
from duat_cli.results.base import Run
from duat_cli.results.check import BaselineFacts, Change, CheckedFile, CheckedModel, CheckReport, Counts, RuleFacts
from duat_cli.results.prompts import all_prompts, set_of
from duat_cli.text import clean, natural, shown

NO_FORWARD = "needs a forward pass, which --weights-only leaves out"


@dataclass(frozen=True)
class CheckPlan:
    """The plan of a check, made before anything is read."""

    policy: Policy
    settings: Mapping[str, Settings]
    baseline_name: str | None
    baseline: BaselineFile | None
    update: bool
    weights_only: bool
    dtype: str
    """The value of --dtype."""
    base: str | None = None
    """The checkpoint whose baseline is made in this run and goes by its name, without a file."""

    @property
    def on(self) -> list[Settings]:
        """The settings of the rules that are on."""
        return [settings for settings in self.settings.values() if settings.on]

    def needs(self, need: Need) -> bool:
        """Whether a rule that is on needs it."""
        return any(need in settings.rule.needs for settings in self.on)

    @property
    def forward(self) -> bool:
        """Whether a rule that is on needs a forward pass."""
        wanted = [s.rule for s in self.on if self.baseline or "baseline" not in s.rule.needs]
        needed = {need for rule in wanted for need in rule.needs}
        return not self.weights_only and (
            self.update or bool({"report", "load", "slack", "behaviour", "tokenizer"} & needed)
        )

    @property
    def asks(self) -> bool:
        """Whether the model's answers are looked at."""
        return self.forward and (self.needs("behaviour") or self.update or self.baseline is not None)

    @property
    def asks_metrics(self) -> bool:
        """Whether numbers of the model's answers are compared with the baseline."""
        return self.asks and self.schema >= baselines.ANSWERS_SCHEMA

    @property
    def schema(self) -> int:
        """The schema version of the baseline to compare with."""
        return self.baseline.content.schema_version if self.baseline else baselines.SCHEMA

    @property
    def first_sketch(self) -> bool:
        """Whether the sketches of the first baselines are needed."""
        return self.schema == baselines.FIRST_SCHEMA


def plan(
    source: str | None,
    select: Sequence[str],
    name: str | None,
    update: bool,
    weights_only: bool,
    dtype: str,
    base: str | None = None,
) -> CheckPlan:
    """The plan for these options. Raises InputError where they are wrong, nothing would be checked, or the baseline
    does not fit them. source, select, name, dtype, base: values of --policy, --select, --baseline, --dtype and
    --base."""
    if base is not None and (name is not None or update):
        raise InputError(
            f"--base and {'--update-baseline' if name is None else '--baseline'} contradict each other: the baseline "
            "is BASE's, and is not written; leave one of them out"
        )
    policy = read_policy(source, "default" if base is None else "fine-tune")
    settings = settings_of(policy, select)
    if not any(s.on for s in settings.values()):
        raise InputError("no checks ran: the policy and --select leave no rule on")
    if base is not None:
        return CheckPlan(policy, settings, base, None, update, weights_only, dtype, base)
    found = baselines.read_baseline(name) if name is not None else None
    if update and name is None:
        raise InputError("--update-baseline: give the file to write with --baseline FILE")
    if name is not None and found is None and not update:
        raise InputError(f"--baseline {shown(name)}: no such file; --update-baseline makes it")
    if found and not update and not any(s.on for s in settings.values() if "baseline" in s.rule.needs):
        raise InputError(
            f"--baseline {shown(name)}: nothing is compared with it: the policy or --select turns drift off"
        )
    if update and weights_only and found and any(baselines.metric_of(k).kind == "field" for k in found.content.metrics):
        raise InputError(
            f"--update-baseline: {shown(name)} holds metrics of a forward pass, which --weights-only would drop; "
            "run without it, or delete the file"
        )
    return CheckPlan(policy, settings, name, found, update, weights_only, dtype)


def refuse_unheld(plan: CheckPlan, adapter: str | None) -> None:
    """Raises InputError where a policy compares with a base and none is given. adapter: the value of --adapter."""
    source = plan.policy.layers[-1].source
    held = {"policy adapter": "--adapter DIR", "policy fine-tune": "--base BASE"}.get(source)
    if held is not None and adapter is None and plan.baseline_name is None:
        option = source.replace("policy ", "--policy ")
        raise InputError(f"{option}: nothing to hold it against; give {held}, or --baseline FILE")


@dataclass(frozen=True)
class Subject:
    """Facts about the checkpoint for the report, beside the evidence."""

    name: str
    revision: str | None
    fingerprint: str | None
    warnings: tuple[str, ...]
    stack: str | None = None
    """The stack that ran, of a model of several."""


def conclude(plan: CheckPlan, evidence: Evidence, subject: Subject, run: Run) -> tuple[CheckReport, str | None]:
    """The report, and the text of the baseline to write, if one is to be written."""
    evidence = replace(evidence, policy=plan.policy, baseline_file=plan.baseline_name or "")
    metrics, reasons = metrics_of(evidence, plan.schema)
    evidence, fresh = _with_baseline(plan, evidence, metrics, reasons)
    locate = Locator(evidence, plan.baseline_name, plan.base)
    outcomes = [o for settings in plan.on for o in judge(settings, evidence, locate)]
    of_base = plan.base is not None and plan.update  # the run on the base itself, which has no drift
    if not of_base and all(not evidence.absent.keys().isdisjoint(s.rule.needs) for s in plan.on):
        raise InputError(f"no checks ran: {outcomes[0].rule}: {outcomes[0].message}")
    failed = any(o.status == "failed" for o in outcomes)
    text = baselines.to_text(fresh) if fresh and not failed else None
    report = evidence.report
    blocks = [block.name for block in report.blocks] if report else []
    outcomes, causes = grouped(outcomes, evidence.drift or (), evidence.weights.tensors, blocks)
    count = Counter(o.status for o in outcomes)
    ran = {o.rule for o in outcomes if o.status != "skipped"}
    missing = {} if report else dict.fromkeys(("environment", "certificate", "prompt_set"), "no forward pass")
    if evidence.behaviour is None:
        missing["behaviour"] = evidence.absent.get("behaviour", "no rule that is on needs it")
    facts = _baseline_facts(plan, fresh, metrics, failed, evidence.drift or ())
    return CheckReport(
        duat_version=__version__,
        verdict="failed" if failed else "passed",
        model=_model(evidence, subject),
        environment=report.environment if report else None,
        certificate=report.certificate if report else None,
        behaviour=evidence.behaviour,
        prompts=report.prompts if report else [],
        prompt_set=report.prompt_set if report else None,
        policy=[layer.source for layer in plan.policy.layers],
        baseline=facts,
        counts=Counts(passed=count["passed"], failed=count["failed"], warned=count["warned"], skipped=count["skipped"]),
        causes=causes,
        outcomes=outcomes,
        rules=[RuleFacts(id=s.rule.id, about=s.rule.about, advice=s.rule.advice) for s in plan.on if s.rule.id in ran],
        off=[name for name, s in plan.settings.items() if not s.on],
        warnings=[*subject.warnings, *_baseline_warnings(plan, evidence), *(_bounds_warnings(plan) if report else [])],
        run=run,
        reasons=missing | ({} if facts else {"baseline": "no --baseline"}),
    ), (text if facts and facts.status in ("created", "updated") else None)


def _bounds_warnings(plan: CheckPlan) -> list[str]:
    """One warning for each bound whose pattern matches fields that are not computed; it holds for the others."""
    bounds = plan.policy.bounds() if plan.settings["bounds"].on else {}
    return [
        f"{layer.source}: bounds.{shown(pattern)} leaves out {' and '.join(names)}, which take long: they are computed "
        "where a pattern matches nothing else"
        for pattern, (layer, table) in bounds.items()
        if table.level != "off" and (names := leaves_out(pattern))
    ]


# --- the baseline ---------------------------------------------------------------------------------------------


def _with_baseline(
    plan: CheckPlan, evidence: Evidence, metrics: dict[str, Value], reasons: dict[str, str]
) -> tuple[Evidence, Baseline | None]:
    """The evidence with the drift, or with the reason why there is none; and the baseline to write, if any."""
    report = evidence.report
    dtype = report.environment.dtype if report else None
    prompts = None
    if report is not None:
        prompts = baselines.prompt_set(set_of(all_prompts(report)), evidence.declared)
    _check_tolerances(plan, metrics)
    if plan.update:
        if plan.baseline:
            refuse_other_model(plan.baseline, evidence.files, evidence.weights, metrics)
        now, shapes = metrics_of(evidence)[0], baselines.shapes_of(evidence.weights)
        fresh = baselines.new_baseline(evidence.files, now, dtype, prompts, evidence.answers, evidence.declared, shapes)
        return replace(evidence, absent={**evidence.absent, "baseline": "it is being renewed"}), fresh
    if plan.baseline is None:
        return replace(evidence, absent={**evidence.absent, "baseline": "no --baseline was given"}), None
    limit = plan.policy.drift_dtype or dtype or _weights_dtype(plan, evidence)
    old = plan.baseline.content
    refuse_foreign(plan.baseline, evidence.files, evidence.weights, metrics, dtype, prompts)
    other_tokens = retokenised(old.prompts, prompts, written=evidence.written)
    drift = compare(
        old,
        metrics,
        reasons,
        sampling_slack(report),
        plan.policy,
        limit,
        forward=report is not None and not other_tokens,
        shapes=baselines.shapes_of(evidence.weights),
    )
    rounding = by_rounding(plan.baseline, evidence.files, drift, limit)
    if rounding and settings_of(plan.policy)["drift.weights"].level == "error":  # weights of a fine-tune may move
        raise InputError(f"{rounding}, or make a new baseline")
    evidence = replace(evidence, drift=drift, old=old.declared, retokenised=other_tokens, rounding=rounding)
    if old.declared is None:
        evidence.absent["declared"] = f"the baseline, of schema version {old.schema_version}, holds nothing of it"
    if other_tokens:
        evidence.absent["answers"] = other_tokens
        return evidence, None
    return _with_agreement(evidence, old, limit), None


def _with_agreement(evidence: Evidence, baseline: Baseline, dtype: str) -> Evidence:
    """The evidence with the comparison of its answers with the baseline's, or with the reason why there is none."""
    if evidence.behaviour is None or evidence.answers is None:
        return evidence
    found: Agreement | str
    if baseline.answers is None:
        made = "without a forward pass" if baseline.dtype is None else f"by duat {clean(baseline.duat_version)}"
        found = f"the baseline, made {made}, holds no answers; --update-baseline renews it"
    else:
        found = agreement(baseline.answers, evidence.answers, dtype)
    evidence = replace(evidence, behaviour=compared(evidence.behaviour, found))
    if isinstance(found, str):
        evidence.absent["answers"] = found
        return evidence
    return replace(evidence, agreement=found)


def _weights_dtype(plan: CheckPlan, evidence: Evidence) -> str:
    """The dtype of the tolerances without a forward pass: that of --dtype, where 'auto' is the coarsest stored one."""
    if plan.dtype != "auto":
        return SHORT.get(plan.dtype, plan.dtype)
    stored = [RUN_IN[d] for d in baselines.stored_floats(evidence.files)]
    return max(stored, key=lambda d: COARSENESS[d], default="float32")


def _check_tolerances(plan: CheckPlan, metrics: Mapping[str, Value]) -> None:
    """Raises InputError for a tolerance that is for no metric, because it would look meaningful and do nothing."""
    known = {*metrics, *(plan.baseline.content.metrics if plan.baseline else ())}
    for pattern, (layer, _) in plan.policy.tolerances().items():
        asked = pattern.startswith(f"{baselines.BEHAVIOUR}.")
        possible = (plan.weights_only and is_metric(pattern)) or (asked and not plan.asks_metrics)
        if layer.file and not possible and not any(matches(pattern, key) for key in known):
            deep = re.sub(r"(^|\.)\*(?=\.|$)", r"\1**", pattern)
            hint = f"; * is one part of a path, ** any number: {shown(deep)}" if deep != pattern else ""
            raise InputError(
                f"{layer.source}: drift.tolerance.{shown(pattern)} is for no metric of this run"
                f"{hint if any(matches(deep, key) for key in known) else suggestion(pattern, known)}"
            )


def _baseline_warnings(plan: CheckPlan, evidence: Evidence) -> list[str]:
    if plan.baseline_name is not None and evidence.adapter is not None:
        return ["a baseline is of the base alone: what the adapter changes is compared with nothing"]
    rounding = [evidence.rounding] if evidence.rounding else []
    if plan.update or plan.baseline is None or plan.schema == baselines.SCHEMA:
        return rounding
    sketches = "its sketches may be off by 0.63 of a change of low rank, today's by a quarter; "
    answers = " and what the model answers" if plan.asks else ""
    return [
        *rounding,
        f"--baseline {shown(plan.baseline_name)}: of schema version {plan.schema}: "
        f"{sketches if plan.first_sketch else ''}it holds nothing of config.json, the tokenizer{answers}; renew it "
        "with --update-baseline once this check has passed",
    ]


def _baseline_facts(
    plan: CheckPlan, fresh: Baseline | None, metrics: Mapping[str, Value], failed: bool, drift: Sequence[Deviation]
) -> BaselineFacts | None:
    """The report's facts about the baseline. metrics: those of the run, in the schema of the existing baseline."""
    if plan.baseline_name is None:
        return None
    if fresh is None:
        both = [one for one in drift if one.status in ("within", "beyond", "better")]
        held = len(needed(plan.baseline).content.metrics)
        made, count = plan.base is not None, len(both)
        return BaselineFacts(
            file=plan.baseline_name, base=made, status="compared", entries=held, compared=count, changes=[]
        )
    old = plan.baseline.content if plan.baseline else None
    moved = _changes(old.metrics if old else {}, metrics)
    apart = {"metrics", "duat_version", "answers", "declared", "shapes"}
    heads = [(b.model_dump(exclude=apart) if b else {}) for b in (old, fresh)]
    declared = _changes(old.declared, fresh.declared or {}) if old and old.declared is not None else []
    moved.sort(key=lambda change: baselines.metric_of(change.key).kind != "tensor")  # causes first
    changes = [*_changes(*heads), *declared, *moved]
    status: Literal["not written", "created", "updated", "unchanged"] = "updated" if changes else "unchanged"
    if failed or old is None:
        status = "not written" if failed else "created"
    held = len(fresh.metrics)
    return BaselineFacts(file=plan.baseline_name, status=status, entries=held, changes=changes if old else [])


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[Change]:
    keys = sorted({*old, *new}, key=natural)
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return [Change(key=key, old=_text(old.get(key)), new=_text(new.get(key))) for key in changed]


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list) and value and isinstance(value[0], float | int):
        return f"norm {value[0]:.6g} and its sketch"
    return f"{value:.6g}" if isinstance(value, float | int) else str(value)


# --- facts ------------------------------------------------------------------------------------------------------


def _model(evidence: Evidence, subject: Subject) -> CheckedModel:
    files = evidence.files
    model_type = files.config.get("model_type")
    reasons = {
        **({} if subject.revision else {"revision": "a local folder has none"}),
        **({} if subject.fingerprint else {"fingerprint": "the model was not loaded"}),
        **({} if isinstance(model_type, str) else {"model_type": "config.json names none"}),
    }
    return CheckedModel(
        name=subject.name,
        path=str(files.path),
        revision=subject.revision,
        model_type=model_type if isinstance(model_type, str) else None,
        files=[CheckedFile(name=s, bytes=(files.path / s).stat().st_size) for s in files.shards],
        tensors=len(files.stored),
        stored=sorted({t.dtype for t in files.stored.values()}),
        quantised=files.quantised,
        stack=subject.stack,
        header_sha256=_header_hash(evidence),
        fingerprint=subject.fingerprint,
        reasons=reasons,
    )


def _header_hash(evidence: Evidence) -> str:
    total = hashlib.sha256()
    for name, entry in sorted(evidence.files.stored.items()):
        total.update(f"{name}\0{entry.shape}\0{entry.dtype}\0".encode("utf-8", "surrogatepass"))
    return total.hexdigest()
