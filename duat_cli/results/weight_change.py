"""Change of the weights, parameter by parameter, and the comparison of two such changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, Result, Share, WithReasons
from duat_cli.results.meaning import Meaning

_AS_SPECTRAL_NORM = "of a dense difference over 1,024 wide as spectral_norm"
_OF_RIGHT = "the same of the right singular vectors"
_ALIGNED = Meaning(
    "share, 0 to 1",
    "exact",
    how="over 1,024 wide to the tolerance of Lanczos",
    formula="|U_base^T U_change|_F^2 / min(k, j)",
)
_INTRUDERS = Meaning(
    "vectors",
    "exact",
    how="null where it is not settled",
    formula="of the k leading singular vectors of W + dW, those with |cosine| < epsilon to every one of W",
    source="intruder dimensions, Shuttleworth et al. (2024)",
)
_RANDOM = Meaning("share, 0 to 1", "exact", how="the mean over random subspaces", formula="max(k, j) / side")


class Alignment(Result):
    """Share of the change in the base weight's leading directions: |U_base^T U_change|_F^2 / min(k, j)."""

    k: int = Field(description="leading singular directions of the base weight")
    j: int = Field(description="leading singular directions of the change")
    output: Annotated[Share, _ALIGNED] = Field(description="on the output side")
    output_random: Annotated[Share, _RANDOM] = Field(description="what a random subspace would give")
    input: Annotated[Share, replace(_ALIGNED, formula=_OF_RIGHT)] = Field(description="on the input side")
    input_random: Annotated[Share, _RANDOM] = Field(description="what a random subspace would give on the input side")


class Intruders(WithReasons):
    """Leading singular vectors of the tuned weight that resemble no singular vector of the base weight."""

    k: int = Field(description="leading singular vectors of the tuned weight that are looked at")
    epsilon: Annotated[Finite, Meaning("cosine", "given")] = Field(
        description="an intruder's |cosine| with every singular vector of the base is below it"
    )
    output: Annotated[int | None, _INTRUDERS] = Field(description="intruders among the k on the output side")
    input: Annotated[int | None, replace(_INTRUDERS, formula=_OF_RIGHT)] = Field(
        description="intruders among the k on the input side"
    )


class Rounding(WithReasons):
    """Effect that rounding can have on the singular values of a difference of two stored weights."""

    dtype: str = Field(description="of the tuned weight as it is stored")
    floor: Annotated[
        Finite,
        Meaning(
            "norm of dW",
            "estimate",
            how="from above, with rounding errors taken as independent",
            source="the norm of a matrix of independent errors, Bandeira & van Handel (2016)",
        ),
    ] = Field(
        description="spectral norm that rounding alone may give: of both weights to their stored dtypes, of the change "
        "(a product computed in the tuned weight's dtype, with sums in float32) before it was added, and the error of "
        "the singular values found here; an upper estimate that takes rounding errors as independent"
    )
    rank_above_floor: Annotated[int | None, Meaning("directions", "estimate", how="from floor")] = Field(
        description="singular values above the floor: what rounding did not make"
    )


class _OfParameter(WithReasons):
    """Base of results on one parameter."""

    name: str = Field(description="the base model's module; of a parameter outside of all modules its own name")
    parameter: str = Field(description="of that module, such as weight or bias")

    @property
    def whole_name(self) -> str:
        """Name of the parameter in the files."""
        return self.name if self.name == self.parameter else f"{self.name}.{self.parameter}"


class ModuleChange(_OfParameter):
    """Change of one parameter of the base model; a stack of experts counts as a block-diagonal matrix."""

    kind: str = Field(description="lora, dora, embedding lora, expert lora, adalora, ia3, loha, lokr, saved, full, ...")
    shape: list[int] = Field(description="of the parameter as the base stores it")
    rank: Annotated[int | None, Meaning("directions", "given", how="stated in the adapter")] = Field(
        description="as the adapter states it, for each expert"
    )
    scaling: Annotated[Finite | None, Meaning("factor", "given", how="stated in the adapter", signed=True)] = Field(
        description="what multiplies B A"
    )
    relative_to: str = Field(
        description="'base', or the initialisation whose own B A was taken out of the base that it was trained on"
    )
    frobenius_norm: Annotated[Finite | None, Meaning("norm of dW", "exact", formula="|dW|_F")] = Field(
        description="Frobenius norm of the change"
    )
    relative_frobenius: Annotated[Finite | None, Meaning("relative", "exact", formula="|dW|_F / |W|_F")] = Field(
        description="to the base parameter's norm"
    )
    spectral_norm: Annotated[
        Finite | None,
        Meaning(
            "norm of dW",
            "exact",
            how="of a dense difference over 1,024 wide by Lanczos, relative residual at most 1e-3, unless --directions "
            "is given",
            formula="sigma_1(dW)",
            source="two thin QR factorisations and a small SVD, where dW is a product of factors",
        ),
    ] = Field(description="the largest singular value of the change")
    numerical_rank: Annotated[int | None, Meaning("directions", "exact")] = Field(
        description="singular values above max(shape) eps sigma_1; eps of float64 "
        "where the change is known by its factors, else of float32"
    )
    stable_rank: Annotated[
        Finite | None, Meaning("directions", "exact", how=_AS_SPECTRAL_NORM, formula="sum sigma^2 / sigma_1^2")
    ] = Field(description="how many directions carry the change, by energy relative to the largest")
    entropy_rank: Annotated[
        Finite | None, Meaning("directions", "exact", formula="exp(-sum p ln p), p = sigma^2 / sum sigma^2")
    ] = Field(description="how many directions carry the change, by the entropy of their energies")
    energy_rank_90: Annotated[
        int | None, Meaning("directions", "exact", formula="fewest directions with 90 % of sum sigma^2")
    ] = Field(description="fewest directions that hold 90 % of sum of sigma^2")
    singular_values: Annotated[list[Finite] | None, Meaning("norm of dW", "exact", how=_AS_SPECTRAL_NORM)] = Field(
        description="the leading ones, at most 16"
    )
    alignment: Alignment | None = Field(description="with the base's leading subspaces")
    intruders: Intruders | None
    sup_local: Annotated[
        Finite | None,
        Meaning(
            "norm of the module's output at one token",
            "bound",
            how="for every possible input behind the norm in front; attained behind an RMSNorm, whose epsilon is "
            "neglected",
            formula="sqrt(M) sigma_max(dW diag(gain) P) + |dW beta|; P takes out the mean where the norm is a "
            "LayerNorm",
        ),
    ] = Field(
        description="largest norm that the change can add to the module's output, for every possible input behind "
        "the norm in front"
    )
    rounding: Rounding | None = Field(default=None, description="for a full checkpoint: what rounding may have made")
    added_rows: int = Field(
        default=0,
        description="rows that the base has not (a resized vocabulary), below 0: that it lost; not in the norms",
    )


class KindChange(WithReasons):
    """All changed parameters of one kind together, such as the query projections of all blocks."""

    name: str = Field(
        description="what their names have in common: without 'weight', the number of the block and what stands in "
        "front of it, unless the model has several stacks; * for the numbers of experts"
    )
    parameters: Annotated[int, Meaning("count", "exact")] = Field(description="how many there are")
    blocks: list[int] = Field(description="numbers of the blocks that they are in, from 0; empty outside of blocks")
    share: Annotated[
        Share | None, Meaning("share, 0 to 1", "exact", formula="sum |dW|_F^2 of the kind / sum |dW|_F^2 of all")
    ] = Field(description="of the whole change; those of all kinds add up to 1")
    relative: Annotated[
        Finite | None, Meaning("relative", "exact", formula="sqrt(sum |dW|_F^2 / sum |W|_F^2), W of dW > 0")
    ] = Field(description="of those that change, together, to their base weights together; no mean of ratios")
    relative_least: Annotated[Finite | None, Meaning("relative", "exact", formula="min |dW|_F / |W|_F")] = Field(
        description="of the parameter that changes least, to its base weight"
    )
    relative_most: Annotated[Finite | None, Meaning("relative", "exact", formula="max |dW|_F / |W|_F")] = Field(
        description="of the parameter that changes most, to its base weight"
    )
    most_in: Annotated[int | None, Meaning("number", "exact")] = Field(
        description="number of the block in which that one is, from 0"
    )
    rank_limit: Annotated[int | None, Meaning("directions", "given", how="from what the adapter states")] = Field(
        description="how many directions the factors allow a change, the most of the kind: the stated rank, of a stack "
        "of experts that of all experts together"
    )
    energy_rank_90_most: Annotated[int | None, Meaning("directions", "exact", formula="max of energy_rank_90")] = Field(
        description="fewest directions that hold 90 % of a change's sum of sigma^2, of the parameter that needs most"
    )
    with_intruders: Annotated[int | None, Meaning("count", "exact")] = Field(
        description="how many have intruders on the output side; null where it is not settled of every one"
    )


class ModuleComparison(_OfParameter):
    """Comparison of two adapters' changes of one parameter; gauge, rank and the split of the scale do not matter."""

    cosine: Annotated[Finite | None, Meaning("-1 to 1", "exact", formula="<dW1, dW2> / (|dW1| |dW2|)", signed=True)] = (
        Field(description="of the two changes, each taken as one vector")
    )
    distance: Annotated[Finite, Meaning("norm of dW", "exact", formula="|dW1 - dW2|_F")] = Field(
        description="norm of the difference of the two changes"
    )
    relative_distance: Annotated[
        Finite | None, Meaning("0 to 1", "exact", formula="|dW1 - dW2|_F / (|dW1|_F + |dW2|_F)")
    ] = Field(description="distance, relative to the sum of the norms of the two changes")
    output_cosines: Annotated[list[Finite] | None, Meaning("0 to 1", "exact")] = Field(
        description="of the principal angles between the output subspaces"
    )
    input_cosines: Annotated[list[Finite] | None, Meaning("0 to 1", "exact")] = Field(
        description="of the principal angles between the input subspaces"
    )


class KindComparison(WithReasons):
    """Comparison of two adapters' changes of all parameters of one kind, each adapter's taken as one vector."""

    name: str = Field(description="as in kinds")
    parameters: Annotated[int, Meaning("count", "exact")] = Field(description="how many of it both change")
    cosine: Annotated[
        Finite | None, Meaning("-1 to 1", "exact", formula="sum <dW1, dW2> / (|all dW1| |all dW2|)", signed=True)
    ] = Field(description="of the changes of all of them as two vectors; no mean of cosines")
    cosine_least: Annotated[Finite | None, Meaning("-1 to 1", "exact", signed=True)] = Field(
        description="the smallest cosine of one parameter"
    )
    cosine_most: Annotated[Finite | None, Meaning("-1 to 1", "exact", signed=True)] = Field(
        description="the largest cosine of one parameter"
    )
    relative_distance: Annotated[
        Finite | None, Meaning("0 to 1", "exact", formula="|all dW1 - all dW2| / (|all dW1| + |all dW2|)")
    ] = Field(description="distance of the two vectors, relative to the sum of their norms")


class Comparison(WithReasons):
    """Comparison of two adapters of one base."""

    other: str = Field(description="the second adapter")
    modules: list[ModuleComparison] = Field(description="changed by both")
    kinds: list[KindComparison] = Field(default=[], description="the same by kind of parameter")
    only_first: list[str] = Field(description="parameters that only the first adapter changes")
    only_second: list[str] = Field(description="parameters that only the second adapter changes")
    cosine: Annotated[
        Finite | None, Meaning("-1 to 1", "exact", formula="sum <dW1, dW2> / (|all dW1| |all dW2|)", signed=True)
    ] = Field(description="of all changes as one vector")
    agreeing: list[str] = Field(description="parameters with a cosine above 0.5")
    opposing: list[str] = Field(description="parameters with a cosine below -0.5")
