"""`duat attribute`: what predictions are made of, exactly, in one sweep back through the frozen network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from duat_cli import __version__
from duat_cli.analysis.attribute.continued import continued, given_tokens, summed
from duat_cli.analysis.attribute.measure import Measurer
from duat_cli.analysis.attribute.report import attributions
from duat_cli.analysis.attribute.targets import Asked, Chooser, Words
from duat_cli.analysis.attribute.work import Work
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError, UnsupportedModelError
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.instrument.foreign import model_code
from duat_cli.models.sweep.ending import EndingForm
from duat_cli.results.attribute import AttributeReport, Attribution, AttributionCertificate
from duat_cli.results.base import Skipped

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SHARED = "blocks in front of it made it (shared values, perhaps); it is held, and what it adds counts among biases"


@dataclass(frozen=True)
class AttributeOptions:
    """What `duat attribute` computes."""

    asked: Asked = field(default_factory=Asked)
    top: int = 10
    """How many neurons, experts and heads' flows are kept."""
    steps: int = 0
    """How many greedy tokens behind each prompt are attributed."""
    continuation: str | None = None
    """Given tokens behind each prompt, by their log-probability."""
    each: Sequence[str] | None = None
    """A target for every prompt."""
    measure: int = 0
    """How many leading heads, neurons and tokens are taken out for real."""


def attribute(
    loaded: LoadedModel, prompts: Sequence[Prompt], words: Words, options: AttributeOptions, progress: Progress
) -> AttributeReport:
    """The parts of every asked prediction of `prompts`."""
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__}: its decoder's cross-attention is outside the form, so its logits have no "
            "exact parts"
        )
    session = Session(loaded, progress, cache=False)
    labels = {int(k): str(v) for k, v in (getattr(loaded.model.config, "id2label", None) or {}).items()}
    given = [] if options.continuation is None else given_tokens(words, options.continuation)
    ran_on = bool(options.steps or given)
    if options.measure and (options.asked.position == "all" or ran_on):
        raise InputError("--measure: one position at a time; expected --position with a number")
    read = prompts
    if ran_on:
        prompts = continued(session, prompts, options.steps, given, progress)
    more = [prompt.input_ids.shape[1] - p.input_ids.shape[1] for prompt, p in zip(prompts, read, strict=True)]
    chooser = Chooser(
        options.asked, words, labels, each=options.each, continued=more if ran_on else (), likelihood=bool(given)
    )
    work = Work(session, prompts, chooser, progress, max(options.top, options.measure), options.top)
    found: list[Attribution] = []
    with model_code(type(loaded.model).__name__):
        ran = work.run()
    assert work.form is not None
    assert work.chain is not None
    if options.measure:
        work.chain.require()
    broken = work.chain.broken()
    for some in ran:
        measured = None
        if options.measure:
            progress(some.prompt, len(prompts), f"removing what leads in prompt {some.prompt + 1} of {len(prompts)}")
            ids, target = prompts[some.prompt].input_ids.to(loaded.device), some.targets[0]
            measured = Measurer(session, work.sites, work.form, ids, target).of(some, options.measure)
        found += attributions(some, prompts, chooser, words, options.top, measured)
    residual = max(max(one.residual, one.direct.residual) for one in found)
    summary = work.many.summary(found, options.top)
    tolerance = max(TOLERANCES[dtype] for dtype in (loaded.model.dtype, *(some.dtype for some in ran)))
    return AttributeReport(
        duat_version=__version__,
        environment=session.environment(),
        model=session.model_facts(),
        prompts=prompt_facts(read),
        certificate=AttributionCertificate(residual=residual, tolerance=tolerance, exact=residual <= tolerance),
        held=held(work.form),
        attribution=found,
        continuations=[
            summed(
                k,
                [one for one in found if one.prompt == k],
                prompt.input_ids[0].tolist(),
                words,
                work.likelihoods.get(k, []),
            )
            for k, prompt in enumerate(prompts if ran_on else ())
        ],
        summary=summary,
        reasons={} if summary is not None else {"summary": "there is one prediction"},
        skipped=[
            *(Skipped(what="model", why=note) for note in session.structure.uncovered),
            *([] if broken is None else [Skipped(what=f"what {broken} reads beside hidden states", why=SHARED)]),
        ],
        warnings=session.warnings(),
        run=session.run_facts(),
    )


def held(form: EndingForm) -> list[str]:
    """What is fixed between the last block and the logits, in words."""
    found = [f"{kind}: its scale" for kind in form.held_kinds]
    if form.held:
        found.append("activations of the head: the ratio of what they give to what they get")
    if form.layer is not None:
        found.append(f"behind {type(form.layer).__name__}, the head's last layer, the logits are capped: its output is "
                     "attributed, and both are printed")  # fmt: skip
    return found
