"""The linear layers that can be refitted: those that read the terms of a block and write towards the stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duat_cli.compat.torch import parameters_of
from duat_cli.errors import UnsupportedModelError
from duat_cli.kinds import Kind
from duat_cli.models.arrays import wide
from duat_cli.models.block.linears import applied_axis, bias_of
from duat_cli.models.discovery.structure import ModelStructure
from duat_cli.models.sweep.passes import Removal
from duat_cli.models.terms.sites import Site, Sites
from duat_cli.results.base import Skipped

READ: dict[Kind, str] = {"head": "the output projection of attention", "neuron": "the FFN's last layer"}
EXPERTS = "an expert sees the tokens that are routed to it alone, and with other tokens once the stream has moved"


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer whose inputs are the neurons, or the heads, of one block."""

    site: Site
    weight: nn.Parameter
    axis: int
    """Axis of the weight that runs over the inputs."""
    bias: nn.Parameter | None
    arrives: bool
    """Whether the layer's output is added to the block's output as it is."""

    @property
    def width(self) -> int:
        return self.weight.shape[self.axis]

    def kept(self, removal: Removal | None) -> Tensor:
        """Indices of the inputs that stay."""
        mask = None if removal is None else removal.masks.get(self.site)
        if mask is None:
            return torch.arange(self.width, device=self.weight.device)
        stays = mask.bool().repeat_interleave(self.width // self.site.count)
        return stays.nonzero()[:, 0].to(self.weight.device)

    def silent(self, removal: Removal | None) -> bool:
        """Whether the layer's output is removed as a whole."""
        if removal is None:
            return False
        gone = (site for site in removal.masks if site.place == "output")
        return removal.whole or any(self.site.module in set(site.module.modules()) for site in gone)

    def changed(self, change: Tensor, kept: Tensor, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
        """The layer's parameters plus `change`, (inputs kept, and one more row with a bias; outputs), the sum rounded
        to `dtype`. Weights of inputs that are gone become zero."""
        matrix = self.weight.detach().movedim(self.axis, 0)
        new = torch.zeros_like(matrix)
        new[kept] = (matrix[kept].double() + change[: len(kept)]).to(dtype).to(matrix)
        found = {self.weight: new.movedim(0, self.axis).contiguous()}
        if self.bias is not None:
            found[self.bias] = (self.bias.detach().double() + change[-1]).to(dtype).to(self.bias)
        return found

    def moved(self, after: Tensor, inputs: Tensor, values: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The block's output with these parameters, for a layer that arrives. after: the block's output without them;
        inputs: those of the layer, zero where removed."""
        if self.weight not in values:
            return after
        apart = (wide(values[self.weight]) - wide(self.weight.detach())).movedim(self.axis, 0)
        step = wide(inputs) @ apart
        if self.bias is not None:
            step = step + (wide(values[self.bias]) - wide(self.bias.detach()))
        return after + step.to(after).reshape(after.shape)


def consumers(
    model: nn.Module, structure: ModelStructure, sites: Sites
) -> tuple[dict[int, list[Consumer]], list[Skipped]]:
    """The layers to refit of every block call, in the order in which they run; and the kinds that are left as they are,
    with the reason."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found: dict[int, list[Consumer]] = {}
    left: dict[tuple[str, str], int] = {}
    for call, module in enumerate(structure.calls):
        found[call] = []
        for kind in ("head", "neuron"):
            try:
                mine = [_consumer(structure, call, site, uses) for site in sites[module].of(kind)]
            except UnsupportedModelError as fault:
                mine = []
                left.setdefault((kind, str(fault)), call)
            if not mine and kind in sites[module].reasons and kind not in {k for k, _ in left}:
                routed = kind == "neuron" and sites[module].of("expert")
                left[kind, EXPERTS if routed else sites[module].reasons[kind]] = call
            found[call] += mine
    skipped = [Skipped(what=f"{READ[k]} from block {n} on", why=why) for (k, why), n in left.items()]  # type: ignore[index]
    return found, skipped


def _consumer(structure: ModelStructure, call: int, site: Site, uses: Counter[nn.Parameter]) -> Consumer:
    module, block = site.module, structure.calls[call]
    if structure.calls.count(block) > 1:
        raise UnsupportedModelError("several blocks are one module: what suits one of them would change the others")
    weight, bias = (parameters_of(module).get(name) for name in ("weight", "bias"))
    if weight is None or not weight.is_floating_point():
        raise UnsupportedModelError(f"{type(module).__name__} keeps no weights that could be refitted")
    if any(uses[p] > 1 for p in (weight, bias) if p is not None):
        raise UnsupportedModelError("its weights are tied to another place of the model")
    axis = applied_axis(module)
    given = bias_of(module, weight.shape[axis])
    if (given is None and bias is not None and bool(bias.any())) or (given is not None and bias is None):
        raise UnsupportedModelError(f"{type(module).__name__} does not add its bias to what it gives")
    arrives = site.kind == "neuron" and structure.block(call).parts.arrives
    return Consumer(site, weight, axis, bias, arrives)
