"""`duat attribute`: the exact parts of predictions, from one sweep back through the frozen network."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from duat_cli.analysis.attribute.continued import Continued, continued, summed
from duat_cli.analysis.attribute.measure import Measurer
from duat_cli.analysis.attribute.report import attributions
from duat_cli.analysis.attribute.targets import Asked, Chooser, why_by_length
from duat_cli.analysis.attribute.total import Attributed, AttributeHead, AttributeTotal
from duat_cli.analysis.attribute.work import Found, Work
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.session import Session, prompt_facts
from duat_cli.errors import InputError, UnsupportedModelError, needed
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.model.processes import Processes
from duat_cli.loading.prompts import Prompt
from duat_cli.loading.texts import Field
from duat_cli.loading.words import Labels, Words
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.causality import head_of
from duat_cli.models.discovery.modality import is_pair, stack_of, writes
from duat_cli.models.foreign import model_code
from duat_cli.models.sweep.ending import EndingForm
from duat_cli.results.attribute import AttributeReport, Attribution, Continuation
from duat_cli.results.base import Skipped
from duat_cli.text import indices

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SHARED = "blocks in front of it made it; it is held, and what it adds counts among biases"


@dataclass(frozen=True)
class AttributeOptions:
    """Options of `duat attribute`."""

    asked: Asked = field(default_factory=Asked)
    top: int = 10
    """How many neurons, experts and heads' flows are kept."""
    steps: int = 0
    """How many greedy tokens after each prompt are attributed."""
    continuation: str | None = None
    """Given text after each prompt, whose tokens are attributed by their log-probability."""
    each: tuple[Field | None, Field | None] = (None, None)
    """Fields that hold each prompt's own target, and what is subtracted from it."""
    measure: int = 0
    """How many leading heads, neurons and tokens are removed for real."""


class Attributor:
    """Attributes prompts of one model. What is found once for the model is found with the first prompts."""

    def __init__(
        self, session: Session, words: Words, options: AttributeOptions, progress: Progress, count: int
    ) -> None:
        """count: number of all prompts that it will be asked about."""
        loaded = session.loaded
        if is_pair(loaded.model):
            way = "; give --stack decoder" if writes(loaded.model) else ", which duat cannot read by itself"
            raise UnsupportedModelError(f"{type(loaded.model).__name__}: what it puts out is its decoder's{way}")
        if loaded.like is not None and (options.measure or options.steps or options.continuation is not None):
            what = "a decoder" if loaded.pair is not None else "pictures within a text"
            raise InputError(f"--measure, --steps and --continuation: not of {what} yet; leave them out")
        self._session, self._words, self._options, self._progress = session, words, options, progress
        labels = Labels(loaded.model.config)
        given = options.continuation
        if given is not None and not words.tokens("--continuation", given):
            raise InputError("--continuation: the tokenizer makes no tokens of it; expected one at least")
        self._runs_on = bool(options.steps) or given is not None
        if options.measure and self._runs_on:
            raise InputError("--measure: one position at a time; leave out --measure, or --steps and --continuation")
        if options.measure and options.asked.position == "all":
            raise InputError("--measure: one position at a time; expected --position with a number")
        model = session.loaded.model
        why = why_by_length(model.config, model.dtype)
        self._chooser = Chooser(options.asked, words, labels, likelihood=given is not None, by_length=why)
        self._work = Work(session, self._chooser, progress, max(options.top, options.measure), options.top, count)
        self._tolerance = 0.0

    def __call__(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Attributed]:
        """Attributions of prompts, which come with their numbers, in order."""
        options, work, session = self._options, self._work, self._session
        texts = [Continued(prompt) for _, prompt in prompts]
        if self._runs_on:
            behind = functools.partial(self._words.behind, text=options.continuation or "")
            texts = continued(session, prompts, options.steps, behind, self._progress)
        for (number, prompt), whole in zip(prompts, texts, strict=True):
            target, against = (None if field is None else field.of(prompt.line) for field in options.each)
            self._chooser.expect(number, target=target, against=against, continued=whole.count, alone=whole.alone)
        numbered = {number: whole.prompt for (number, _), whole in zip(prompts, texts, strict=True)}
        with model_code(type(session.loaded.model).__name__):
            if options.asked.position == "all" and options.asked.target is None:
                self._chooser.masked = self._masked
            ran = work.run(numbered)
        found: dict[int, list[Attribution]] = {number: [] for number in numbered}
        for some in ran:
            text = numbered[some.prompt]
            measurer = self._measurer(some, text) if options.measure else None
            self._tolerance = max(self._tolerance, *(TOLERANCES[d] for d in (session.loaded.model.dtype, some.dtype)))
            found[some.prompt] += attributions(some, text, self._chooser, self._words, options.top, measurer)
        return [
            Attributed(
                attribution=found[number],
                continuation=self._continuation(number, found[number], text),
                sums=work.sums.pop(number),
            )
            for number, text in numbered.items()
        ]

    @functools.cached_property
    def _masked(self) -> bool:
        """Whether the model's output at a token predicts that token, as in a masked LM."""
        loaded = self._session.loaded
        if loaded.like is not None:  # a decoder, or pictures within a text
            return False
        head = head_of(loaded.model, stack_of(loaded.model))
        return head.exists and not head.causal

    def _measurer(self, some: Found, text: Prompt) -> Measurer:
        work, session = self._work, self._session
        needed(work.chain).require()
        self._progress(some.prompt, work.count, f"removing what leads in prompt {some.prompt + 1} of {work.count}")
        ids = text.input_ids.to(session.loaded.device)
        return Measurer(session, work, ids, some.targets[0], self._options.measure)

    def _continuation(self, number: int, found: list[Attribution], text: Prompt) -> Continuation | None:
        if not self._runs_on:
            return None
        likelihood = self._work.likelihoods.pop(number, [])
        return summed(number, found, text.input_ids[0].tolist(), self._words, likelihood)

    def head(self) -> AttributeHead:
        """The part of the report that no prompt changes; known once one has run."""
        session, work = self._session, self._work
        broken = needed(work.chain).broken()
        every = [block.parts for block in session.structure.blocks]
        if any(parts.mixer is not None or parts.streams > 1 for parts in every):  # kernels and weights round to float32
            self._tolerance = max(self._tolerance, tolerance_for(torch.float64))
        return AttributeHead(
            environment=session.environment(),
            model=session.model_facts(),
            held=held(needed(work.form)),
            tolerance=self._tolerance,
            skipped=[
                *(Skipped(what="model", why=note) for note in session.structure.uncovered),
                *([] if broken is None else [Skipped(what=f"what {broken} reads beside hidden states", why=SHARED)]),
            ],
            warnings=[*session.warnings(), *self._without_neurons()],
        )

    def _without_neurons(self) -> list[str]:
        """Warnings about blocks with an FFN whose neurons are not listed. Blocks with experts are left out, as neurons
        are then listed within experts."""
        found: dict[str, list[int]] = {}
        for number, module in enumerate(self._session.structure.calls):
            sites = self._work.sites[module]
            if sites.count("ffn") and not sites.count("expert") and "neuron" in sites.reasons:
                found.setdefault(sites.reasons["neuron"], []).append(number)
        return [f"{indices('block', numbers)}: no neurons are listed: {why}" for why, numbers in found.items()]


def attribute(
    loaded: LoadedModel, prompts: Sequence[Prompt], words: Words, options: AttributeOptions, progress: Progress
) -> AttributeReport:
    """The report with the parts of every prediction of `prompts` that was asked for."""
    processes = Processes(loaded.processes, progress, loaded.model)
    session = Session(loaded, progress, cache=False, factors=False)
    each = Attributor(session, words, options, processes, len(prompts))
    total, numbered = AttributeTotal(options.top), list(enumerate(prompts))

    def work(one: tuple[int, Prompt]) -> Attributed:
        [found] = each([one])
        return found

    ran: Iterable[Attributed] = processes.first_here(work, numbered) if loaded.paged is None else each(numbered)
    for facts, found in zip(prompt_facts(prompts), ran, strict=True):
        total.add(facts, found)
    return total.report(each.head(), session.run_facts(processes.memory))


def held(form: EndingForm) -> list[str]:
    """Descriptions of what is held between the last block and the logits."""
    found = [f"{kind}: its scale" for kind in form.held_kinds]
    if form.held:
        found.append("activations: the ratio of what they give to what they get")
    if form.layer is not None:
        found.append(f"behind {type(form.layer).__name__}, the head's last layer, the logits are capped: its output is "
                     "attributed, and both are printed")  # fmt: skip
    return found
