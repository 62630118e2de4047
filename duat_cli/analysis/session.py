"""A session: what is known of one loaded model beyond a prompt, and the facts that every report begins with."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from duat_cli import __version__
from duat_cli.analysis.clock import Clock
from duat_cli.analysis.decomposition import Step
from duat_cli.analysis.geometry import Geometry, bare, geometry, known_or
from duat_cli.analysis.own_fault import blaming, of_weights, pointing, refusing, require_map, require_signal
from duat_cli.analysis.plan.shape import shape_of
from duat_cli.analysis.plan.waves import prompt_waves
from duat_cli.analysis.progress import Progress
from duat_cli.analysis.stacks import stack_read
from duat_cli.cache.tensors import TensorCache, gram_key
from duat_cli.errors import NotFiniteError, UnsupportedModelError, needed
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.attempts import Known
from duat_cli.models.discovery.chains import ChangedStreamError, blocks_expected, by_name
from duat_cli.models.discovery.modality import Given, placed, stack_of
from duat_cli.models.discovery.structure import Discovered, Discovery, ModelStructure, discover, run_stack
from duat_cli.models.discovery.unread import ENCODER_ALONE
from duat_cli.models.holding import holding
from duat_cli.models.instrument.plain import InstrumentedPass, PlainPass, deviation
from duat_cli.models.instrument.rig import BlockRun, Rig
from duat_cli.models.sweep.lockstep import Guest, Pass, Weights, one_by_one, shown, side_by_side, together
from duat_cli.models.value_path.factors import checked
from duat_cli.models.value_path.operator import AttentionOperator
from duat_cli.results.base import Certificate, Environment, ModelFacts, PromptFacts, Run, Skipped

Listener = Callable[[BlockRun], None]
"""Function that a sweep calls behind every block."""
Ended = Callable[[int, Any], None]
G = TypeVar("G", bound=Guest)


def _ignore(_run: BlockRun) -> None:
    """Listener of a pass that is run only for its output."""


@dataclass(frozen=True)
class _Sweep:
    """The pass of one prompt through the model, and one without instruments, if asked for."""

    seen: InstrumentedPass
    plain: PlainPass | None

    @property
    def passes(self) -> list[Pass]:
        return [self.seen] if self.plain is None else [self.seen, self.plain]

    def plain_error(self) -> float:
        """Relative distance between the outputs of the two passes; 0 if there is only one."""
        return 0.0 if self.plain is None else deviation(self.seen.outputs, self.plain.outputs)


class Session:
    """A loaded model with its proved structure; sweeps run prompts through it.

    The first prompt (every prompt with `every_plain`) also runs without instruments, and the two passes are compared.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        progress: Progress,
        *,
        cache: bool = True,
        every_plain: bool = False,
        factors: bool = True,
    ) -> None:
        """factors: as for `discover`."""
        self.loaded, self._dtype, self._factors = loaded, loaded.model.dtype, factors
        self._every_plain, self._swept = every_plain, False  # whether a prompt has run to its end
        self._structure: ModelStructure | None = None
        self._discovering: Discovery | None = None
        self._known, self._clock = Known(chain=loaded.chain), Clock()
        self._checks = False  # whether W' of the prompt under way is compared with the model's own attention
        self.plain_error = 0.0  # the largest so far
        self.batch_size = 1  # most prompts that run together
        self.whole = False  # whether norms are held as a whole (see `Rig`) in sweeps over weights that are in memory
        self._geometries: dict[tuple[int, bool], Geometry] = {}
        self.heads, self.kv_heads, self.heads_differ, self._most = 0, 0, False, (False, 0, 0)
        if loaded.paged is not None:  # blocks are discovered, and weights hashed, as they pass
            self._cache = TensorCache("", enabled=False)
            return
        progress(0, 1, "fingerprint of the weights")
        self.fingerprint = fingerprint(loaded.model)
        progress(0, 1, "discovery of the model's structure")
        try:
            with pointing(), blaming(loaded):
                self._structure = discover(loaded.model, loaded.like, chain=loaded.chain, factors=factors)
        except UnsupportedModelError as fault:
            raise of_weights(loaded, fault) from fault
        self.plain_error = self._structure.plain_error
        require_map(self._structure, one_by_one, loaded.like)
        self._cache = TensorCache(gram_key(self.fingerprint, loaded.model), enabled=cache)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights."""
        return needed(self.loaded.paged).fingerprint(self.loaded.model)

    @property
    def structure(self) -> ModelStructure:
        """The structure that discovery proved; during a sweep over weights read block by block, as far as proved."""
        if self._structure is None and self._discovering is None:
            self.sweep_all([], lambda _number: _ignore)
        if self._discovering is not None:
            return self._discovering.so_far()
        return needed(self._structure)

    @property
    def depth(self) -> int:
        """How many block calls a prompt goes through."""
        return blocks_expected(self.loaded.model) if self._structure is None else len(self._structure.calls)

    def sweep(self, prompt: Prompt, listener: Listener) -> None:
        """Runs one prompt; `listener` is called behind every block, in order, one block alive at a time."""
        self.sweep_all([prompt], lambda _number: listener)

    def sweep_all(
        self,
        prompts: Sequence[Prompt],
        listener_of: Callable[[int], Listener],
        ended: Ended = lambda _number, _output: None,
        guest_of: Callable[[Discovery], Guest] | None = None,
    ) -> None:
        """Runs prompts. The listener from `listener_of(number)` is called behind every block of that prompt, in order,
        and `ended(number, output of the stack)` behind the last. guest_of: as for `discover_beside`; not used where all
        weights are in memory.

        Where all weights are in memory, the prompts run one after the other; otherwise as many as fit go side by side,
        block by block. Then the sweep may begin again, and `listener_of` is called again.
        """
        if self.loaded.paged is not None:
            for wave in self.waves(prompts):
                self._sweep_paged(wave, listener_of, ended, guest_of)
                guest_of = None
            return
        structure = self.structure
        for number, prompt in enumerate(prompts):
            rig = structure.rig(whole=self.whole)
            sweep = self._prepared(prompt.given, listener_of(number), rig, structure.calls)
            with blaming(self.loaded, [prompt.given]):
                one_by_one(sweep.passes)
            ended(number, sweep.seen.returned)
            self.plain_error, self._swept = max(self.plain_error, sweep.plain_error()), True

    def waves(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Prompt]]:
        """Prompts by number, in waves of as many as fit side by side; one empty wave without prompts."""
        tokens, width = [prompt.input_ids.shape[1] for prompt in prompts], shape_of(self.loaded.files, "auto").stream
        for wave in prompt_waves(tokens, width, self._dtype.itemsize):
            yield {number: prompts[number] for number in wave}

    def discover_beside(self, guest_of: Callable[[Discovered], G]) -> G:
        """Shows a guest what discovery finds, and returns it. Where weights are read block by block, the guest runs
        beside discovery, with a new guest for every attempt, of which the last is returned; otherwise it runs after."""
        if self.weights is None:
            return shown(guest_of(self.structure), self.structure, self.loaded.like)
        return needed(self._sweep_paged({}, lambda _number: _ignore, lambda _number, _output: None, guest_of))

    def together(self, passes: Sequence[Pass]) -> None:
        """Runs passes once blocks are discovered; side by side where weights are read block by block. The first pass
        has to go through every block that any of them goes through."""
        together(passes, self.weights)

    def sweep_beside(
        self, prompts: Sequence[Prompt], listener_of: Callable[[int], Listener], others: Sequence[Pass]
    ) -> None:
        """Runs prompts as `sweep_all` does, once blocks are discovered, with other passes behind theirs."""
        structure, sweeps = self.structure, list[_Sweep]()
        for number, prompt in enumerate(prompts):
            sweeps.append(self._prepared(prompt.given, listener_of(number), structure.rig(), structure.calls))
            self._swept = True
        self.together([*(each for sweep in sweeps for each in sweep.passes), *others])
        self.plain_error = max([self.plain_error, *(sweep.plain_error() for sweep in sweeps)])

    @property
    def weights(self) -> Weights | None:
        """The weights that are read block by block; None where all are in memory."""
        return None if self.loaded.paged is None else self.loaded.paged.pager

    def _sweep_paged(
        self,
        prompts: Mapping[int, Prompt],
        listener_of: Callable[[int], Listener],
        ended: Ended,
        guest_of: Callable[[Discovery], G] | None,
    ) -> G | None:
        """Runs some prompts, by their numbers, side by side in one read of the weights. Returns the last guest."""
        try:
            with pointing(), refusing(self.loaded, [None, *(prompt.given for prompt in prompts.values())], self._grown):
                attempt = functools.partial(self._attempt, prompts, listener_of, guest_of)
                structure, sweeps, guest = self._known.through(attempt)
        except ChangedStreamError as fault:
            alone = Session(replace(self.loaded, chain=fault.name), lambda *_: None, factors=False)
            raise by_name(fault, lambda: alone.structure) from None
        for number, sweep in zip(prompts, sweeps[1:], strict=True):  # the first sweep is the probe's
            ended(number, sweep.seen.returned)
        self.plain_error = max(self.plain_error, *(sweep.plain_error() for sweep in sweeps))
        self._structure = replace(structure, plain_error=sweeps[0].plain_error())
        require_map(self._structure, self.together, self.loaded.like, self.loaded.device)
        return guest

    def _attempt(
        self,
        prompts: Mapping[int, Prompt],
        listener_of: Callable[[int], Listener],
        guest_of: Callable[[Discovery], G] | None,
    ) -> tuple[ModelStructure, list[_Sweep], G | None]:
        """One attempt at discovery, with the sweeps of the probe and of these prompts beside it."""
        found, sweeps = self._grown(), list[_Sweep]()

        def others() -> list[Pass] | None:
            if not found.ready:
                return None
            self._swept = bool(self._structure)  # passes of failed attempts do not count
            proof, blocks = found.proof(), found.elements()
            probe = _ignore if guest is None else guest.probe
            sweeps.append(self._prepared(found.probe, probe, found.rig(), blocks, check=True))
            for number, prompt in prompts.items():
                sweeps.append(self._prepared(prompt.given, listener_of(number), found.rig(), blocks))
                self._swept = True
            more = () if guest is None else guest.passes
            return [proof, *(each for sweep in sweeps for each in sweep.passes), *more]

        def left(page: Any) -> None:
            found.forget(page.doors)
            self._geometries.clear()

        with holding(self, _discovering=found), found.attached():
            guest = None if guest_of is None else guest_of(found)
            found.on_proved = None if guest is None else guest.proved
            side_by_side(needed(self.weights), found, others, left)
        return found.structure(), sweeps, guest

    def _grown(self) -> Discovery:
        loaded = self.loaded
        return Discovery(loaded.model, self._known, loaded.like, factors=self._factors, device=loaded.device)

    def sweep_batch(self, batch: Sequence[Tensor], listener: Listener) -> None:
        """Runs token ids of equal length, (1, N) each, as one batch, like `sweep`. One prompt has to have run by itself
        before, and all weights have to be in memory."""
        structure, given = self.structure, torch.cat([*batch])
        rig = structure.rig(prompts=len(batch))
        one_by_one(self._prepared(given, listener, rig, structure.calls, check=False).passes)

    def _prepared(
        self, given: Given, listener: Listener, rig: Rig, blocks: Iterable[nn.Module], *, check: bool | None = None
    ) -> _Sweep:
        """The passes of one prompt or of a batch, ready to run."""
        given = placed(given, self.loaded.device, self._dtype)
        stack = stack_of(self.loaded.model)
        checks = (self._every_plain or not self._swept) if check is None else check

        def listen(run: BlockRun) -> None:
            if not all(math.isfinite(bound) for bounds in run.extent for bound in bounds):
                why = f"block {run.index} puts out values that are not finite in {self.loaded.dtype}"
                raise of_weights(self.loaded, NotFiniteError(why))
            require_signal(run, given)
            self.count_heads(run)
            self._checks = checks
            listener(run)

        forward = functools.partial(run_stack, stack, given)
        seen = InstrumentedPass(rig, forward, _ignore if listener is _ignore else listen)
        return _Sweep(seen, PlainPass(blocks, forward) if checks else None)

    def count_heads(self, run: BlockRun) -> None:
        """Counts the heads of a block. The largest count is the model's; softmax attention goes before mixers."""
        if run.attention:
            found = run.parts.mixer is None, run.attention[0].rows.heads, run.attention[0].value.shape[1]
            self.heads_differ |= self._most[0] and found[0] and found != self._most
            self._most = _, self.heads, self.kv_heads = max(self._most, found)

    def operator(self, run: BlockRun, step: Step) -> AttentionOperator:
        """W' of this block under this input. Raises UnsupportedModelError where there is none.

        On the first prompt, or on every prompt with `every_plain`, W' x' is compared with what the model's attention
        adds.
        """
        block = self.structure.block(run.index)
        operator = step.operator(run, block)
        if self._checks and block.factors is not None:
            return checked(operator, run, block.factors.tap)
        return operator

    def geometry(self, call: int, *, cross: bool = False) -> Geometry:
        """Geometry of the block of that call, or of its W'_c (`bare`); its factors must exist."""
        block = self.structure.block(call)
        known, name = needed(block.cross if cross else block.factors), block.parts.name
        made = (lambda: bare(known.heads)) if cross else (lambda: geometry(known, name, self._cache))
        return known_or(made, (call, cross), self._geometries)

    def save_cache(self) -> None:
        self._cache.save()

    def environment(self) -> Environment:
        return Environment(
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            platform=platform.system() + " " + platform.machine(),
            device=self.loaded.device,
            dtype=self.loaded.dtype,
            attention="eager",
            batch_size=self.batch_size,
        )

    def model_facts(self) -> ModelFacts:
        model = self.loaded.model
        return ModelFacts(
            name=self.loaded.name,
            revision=self.loaded.revision,
            model_type=model.config.model_type,
            architecture=type(model).__name__,
            stack=stack_read(self.loaded),
            quantised=self.loaded.files.quantised,
            parameters=sum(p.numel() for p in model.parameters()),
            blocks=len(self.structure.calls),
            hidden_size=self.structure.hidden_size,
            streams=self.structure.blocks[0].parts.streams,
            heads=self.heads,
            kv_heads=self.kv_heads,
            fingerprint=self.fingerprint,
        )

    def certificate(self, error: float) -> Certificate:
        tolerance = tolerance_for(self._dtype)
        return Certificate(
            relative_error=error,
            plain_error=self.plain_error,
            tolerance=tolerance,
            exact=max(error, self.plain_error) <= tolerance,
            capture=self.structure.path,
        )

    def warnings(self) -> list[str]:
        """Warnings about the files and the weights."""
        return [*self.loaded.warnings, *self.loaded.value_notes()]

    def skipped(self) -> list[Skipped]:
        """Parts of the model outside the DUAT form, and blocks whose W' has no closed form."""
        every = self.loaded.every_stack
        notes = [note for note in self.structure.uncovered if not (every and note.startswith(ENCODER_ALONE))]
        found = [Skipped(what="model", why=note) for note in notes]
        for call, block in enumerate(map(self.structure.block, range(len(self.structure.calls)))):
            reasons = ("operator", block.factors_reason), ("second operator", block.cross_reason)
            found += [Skipped(what=f"{what} of block {call}", why=why) for what, why in reasons if why]
        return found

    def report_facts(self, error: float, shared: int = 0) -> dict[str, Any]:
        """Fields on model and run that most reports have; called once all prompts are through. error: the largest of
        the certificate; shared: as for `Clock.run`."""
        return {
            "duat_version": __version__,
            "environment": self.environment(),
            "model": self.model_facts(),
            "certificate": self.certificate(error),
            "skipped": self.skipped(),
            "warnings": self.warnings(),
            "run": self.run_facts(shared),
        }

    def run_facts(self, shared: int = 0) -> Run:
        return self._clock.run(self.loaded.planned_memory, device=self.loaded.device, shared=shared)


def prompt_facts(prompts: Sequence[Prompt]) -> list[PromptFacts]:
    return [PromptFacts(sha256=p.sha256, tokens=p.input_ids.shape[1]) for p in prompts]
