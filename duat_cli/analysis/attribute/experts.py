"""Experts of a mixture, and the neurons inside them, as parts of their unit.

    ⟨g, κ Σ_t Σ_e r_te f_e(z_t)⟩ = Σ_e Σ_t r_te (Σ_n a_en(z_t) ⟨g'_t, w_en⟩ + ⟨g'_t, b_e⟩)

with g' the gradient at the experts module's output. The part of an expert is the slope along its routing weights. The
parts of its neurons follow from the form that was proved for the module; with the expert's bias they have to add up to
its part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from duat_cli.errors import UnsupportedModelError, needed
from duat_cli.models.arrays import relative_error, tolerance_for
from duat_cli.models.block.slots import parted
from duat_cli.models.instrument.hooks import hooked
from duat_cli.models.instrument.records import UnitCall
from duat_cli.models.instrument.tracing import Event
from duat_cli.models.sweep.gradients import SiteCall, pulled
from duat_cli.models.terms.experts import Columns, ExpertForm, expert_form, source_of
from duat_cli.models.terms.sites import Site, watching


class KnownExperts:
    """Forms of experts modules, each found once, while its weights are in memory."""

    def __init__(self) -> None:
        self._forms: dict[nn.Module, ExpertForm | None] = {}
        self.columns: dict[nn.Module, Columns] = {}  # of every module with a form
        self.faults: dict[nn.Module, str] = {}  # why a module has no form

    def forget(self) -> None:
        """Forgets the forms; called once weights that are read block by block are gone."""
        self._forms.clear()

    def of(self, event: Event, site: Site) -> ExpertForm | None:
        """The form of a site's module; None where its neurons cannot be told apart."""
        if site.module not in self._forms:
            try:
                found = self._forms[site.module] = expert_form(event, site)
                self.columns[site.module] = Columns.of(found)
            except UnsupportedModelError as fault:
                self._forms[site.module], self.faults[site.module] = None, str(fault)
        return self._forms[site.module]


def expert_parts(
    held: SiteCall, unit: UnitCall, gradient: Tensor, known: KnownExperts
) -> tuple[Tensor | None, Tensor | None]:
    """Parts ⟨gradient, Σ_t r_te f_e(x_t)⟩ of every expert, (targets, experts), and of every neuron in them, (targets,
    experts, neurons), float64. The experts are None unless the unit is linear in its routing weights, and the neurons
    are None unless they add up.

    gradient: at the unit's output, (targets, *its shape).
    """
    leaves: list[Tensor] = []
    events: list[Event] = []

    def routed(scale: float) -> Tensor:
        def put(_: Site, value: Tensor, __: Tensor | None) -> Tensor:
            kept = value.detach().to(torch.promote_types(value.dtype, unit.input.dtype))  # float32 would round slopes
            leaves.append((scale * kept).requires_grad_())
            return leaves[-1]

        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            events.append(Event(module, args, kwargs, output))

        with watching([held.site], put), hooked([held.site.module], after=see):
            output = unit.again()
        return parted(output)[0]

    with torch.enable_grad():
        whole = routed(1.0)
    half, none = (routed(scale).detach() for scale in (0.5, 0.0))
    if not relative_error(2 * (half - none), whole.detach() - none) <= tolerance_for(whole.dtype):
        return None, None
    made = needed(events[0].result)
    slope, at = pulled(whole, [leaves[0], made], gradient.reshape(len(gradient), *whole.shape))
    experts = held.site.collect(slope.double() * held.value.double(), held.index)
    form = known.of(events[0], held.site)
    if form is None or held.index is None:
        return experts, None
    with torch.no_grad():
        z = source_of(events[0], held.site).flatten(0, -2)
        inside, biases = _inside(form, z, held, at.flatten(1, -2))
    size = inside.abs().sum(dim=2) + biases.abs() + experts.abs()
    far = (inside.sum(dim=2) + biases - experts).abs()
    return experts, inside if bool((far <= tolerance_for(whole.dtype) * size).all()) else None


def _inside(form: ExpertForm, z: Tensor, held: SiteCall, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of neurons, (targets, experts, neurons), and of the experts' biases, (targets, experts). z: (T, M);
    gradient: (targets, T, M)."""
    assert held.index is not None
    targets = len(gradient)
    neurons = gradient.new_zeros(targets, form.count, form.neurons, dtype=torch.float64)
    biases = gradient.new_zeros(targets, form.count, dtype=torch.float64)
    for expert in held.index.unique().tolist():
        tokens, places = (held.index == expert).nonzero(as_tuple=True)
        weights, at = held.value[tokens, places, None].double(), gradient[:, tokens]
        activations = weights * form.activations(expert, z[tokens]).double()
        neurons[:, expert] = ((at @ form.columns[expert].T).double() * activations).sum(dim=1)
        if form.bias is not None:
            biases[:, expert] = ((at @ form.bias[expert]).double() * weights[:, 0]).sum(dim=1)
    return neurons, biases
