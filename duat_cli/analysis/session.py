"""Everything about one loaded model that outlives a prompt, and the facts every report opens with."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import transformers

from duat_cli.analysis.clock import Clock
from duat_cli.analysis.decomposition import Step
from duat_cli.analysis.geometry import Geometry, geometry
from duat_cli.analysis.progress import Progress
from duat_cli.cache.tensors import TensorCache, gram_key
from duat_cli.errors import CheckpointError, DuatError, NoSignalError, UnsupportedModelError
from duat_cli.loading.model.fingerprint import fingerprint
from duat_cli.loading.model.load import LoadedModel
from duat_cli.loading.prompts import Prompt
from duat_cli.models.arrays import tolerance_for
from duat_cli.models.discovery.structure import ModelStructure, discover, run_stack
from duat_cli.models.instrument.plain import deviation, instrumented_outputs, plain_outputs
from duat_cli.models.instrument.rig import BlockRun
from duat_cli.models.value_path.factors import AttentionOperator, checked
from duat_cli.results.base import Certificate, Environment, ModelFacts, PromptFacts, Run, Skipped


class Listener(Protocol):
    """What a sweep does behind every block."""

    def __call__(self, run: BlockRun, /) -> None: ...


class Session:
    """A loaded model with its proved structure; sweeps run prompts through it.

    The first prompt, with `every_plain` each, also runs without instruments, and the two passes are compared.
    """

    def __init__(
        self, loaded: LoadedModel, progress: Progress, *, cache: bool = True, every_plain: bool = False
    ) -> None:
        self.loaded = loaded
        self._every_plain, self._swept = every_plain, False  # whether a prompt has run to its end
        self._clock = Clock()
        self._dtype = loaded.model.dtype
        progress(0, 1, "fingerprint of the weights")
        self.fingerprint = fingerprint(loaded.model)
        progress(0, 1, "discovery of the model's structure")
        try:
            self.structure: ModelStructure = discover(loaded.model)
        except UnsupportedModelError as fault:
            raise self._blamed(fault) from fault
        self.plain_error = self.structure.plain_error  # the largest so far
        self._cache = TensorCache(gram_key(self.fingerprint, loaded.model), enabled=cache)
        self._geometries: dict[int, Geometry] = {}
        self.heads = self.kv_heads = 0

    def sweep(self, prompt: Prompt, listener: Listener) -> None:
        """Run one prompt; `listener` is called behind every block, in order, one block alive at a time."""
        ids = prompt.input_ids.to(self.loaded.model.device)

        def listen(run: BlockRun) -> None:
            if not all(math.isfinite(bound) for bound in run.bounds):
                raise self._blamed(
                    UnsupportedModelError(
                        f"block {run.index} puts out values that are not finite in {self.loaded.dtype}"
                    )
                )
            require_signal(run)
            if run.attention and not self.heads:
                self.heads, self.kv_heads = run.attention[0].rows.heads, run.attention[0].value.shape[1]
            listener(run)

        def forward() -> Any:
            return run_stack(self.structure.stack, ids)

        with self.structure.rig().active() as rig:
            seen = instrumented_outputs(rig, forward, listen)
        if self._checks:
            plain = plain_outputs(self.structure.calls[-1], forward)
            self.plain_error = max(self.plain_error, deviation(seen, plain))
        self._swept = True

    @property
    def _checks(self) -> bool:
        """Whether the prompt under way is one that the model's own output is compared on."""
        return self._every_plain or not self._swept

    def operator(self, run: BlockRun, step: Step) -> AttentionOperator:
        """W' of this block and input; UnsupportedModelError says why there is none.

        On the first prompt, with `every_plain` on each, W' x' is compared with what the model's attention adds.
        """
        block = self.structure.block(run.index)
        operator = step.operator(run, block)
        if self._checks and block.factors is not None:
            return checked(operator, run, block.factors.tap)
        return operator

    def geometry(self, call: int) -> Geometry:
        """The Gram matrix and samples of the block of that call; its factors must exist."""
        if call not in self._geometries:
            block = self.structure.block(call)
            assert block.factors is not None
            self._geometries[call] = geometry(block.factors, block.parts.name, self._cache)
        return self._geometries[call]

    def forget_geometry(self) -> None:
        """Compute it anew at the next use."""
        self._geometries.clear()

    def save_cache(self) -> None:
        self._cache.save()

    def _blamed(self, fault: DuatError) -> DuatError:
        """A fault of a model with NaN or Inf weights is the weights' fault: name the tensor."""
        for name, count in self.loaded.nonfinite_weights.items():
            return CheckpointError(
                f"{self.loaded.name}: {name} holds {count} values that are NaN or infinite, so {fault}; "
                "repair the checkpoint"
            )
        return fault

    # -- facts -----------------------------------------------------------------------------------------------

    def environment(self) -> Environment:
        return Environment(
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            platform=platform.system() + " " + platform.machine(),
            device=self.loaded.device,
            dtype=self.loaded.dtype,
            attention="eager",
            batch_size=1,
        )

    def model_facts(self) -> ModelFacts:
        model = self.loaded.model
        return ModelFacts(
            name=self.loaded.name,
            revision=self.loaded.revision,
            model_type=model.config.model_type,
            architecture=type(model).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            blocks=len(self.structure.calls),
            hidden_size=self.structure.hidden_size,
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

    def skipped(self) -> list[Skipped]:
        """Parts of the model outside the DUAT form, and blocks whose W' has no closed form."""
        found = [Skipped(what="model", why=note) for note in self.structure.uncovered]
        for call in range(len(self.structure.calls)):
            reason = self.structure.block(call).factors_reason
            if reason is not None:
                found.append(Skipped(what=f"operator of block {call}", why=reason))
        return found

    def run_facts(self) -> Run:
        return self._clock.run()


def require_signal(run: BlockRun) -> None:
    """Refuses a block that puts out zeros alone: |x - rebuilt| / |x| is 0 / 0 there, and so is every share of x."""
    if not any(run.bounds):
        raise NoSignalError(
            f"every hidden state behind block {run.index} ({run.parts.name}) is zero, so the certificate, an error "
            "relative to the hidden states, is undefined; are the weights zero?"
        )


def prompt_facts(prompts: Sequence[Prompt]) -> list[PromptFacts]:
    return [PromptFacts(sha256=p.sha256, tokens=p.input_ids.shape[1]) for p in prompts]
