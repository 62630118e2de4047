"""Change of the weights, parameter by parameter, and the comparison of two such changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, Result, Share, WithReasons
from duat_cli.results.meaning import Meaning

_AS_SPECTRAL_NORM = "of a dense difference over 1,024 wide as spectral_norm"
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
    formula="of the k leading left singular vectors of W + dW, those with |cosine| < epsilon to every one of W",
    source="intruder dimensions, Shuttleworth et al. (2024)",
)
_RANDOM = Meaning("share, 0 to 1", "exact", how="the mean over random subspaces", formula="max(k, j) / side")


class Alignment(Result):
    """Share of the change in the base weight's leading directions: |U_base^T U_change|_F^2 / min(k, j)."""

    k: int = Field(
        description="number of leading singular directions of the base weight that the change is compared with"
    )
    j: int = Field(
        description="number of leading singular directions of the change that are compared with the base weight's"
    )
    output: Annotated[Share, _ALIGNED] = Field(
        description="overlap of the change's leading directions with the base weight's, on the output side: 1 where "
        "the fewer of them lie within the others"
    )
    output_random: Annotated[Share, _RANDOM] = Field(
        description="overlap that random directions in place of the change's would have with the base weight's leading "
        "ones, on the output side"
    )
    input: Annotated[Share, replace(_ALIGNED, formula="|V_base^T V_change|_F^2 / min(k, j)")] = Field(
        description="overlap of the change's leading directions with the base weight's, on the input side: 1 where the "
        "fewer of them lie within the others"
    )
    input_random: Annotated[Share, _RANDOM] = Field(
        description="overlap that random directions in place of the change's would have with the base weight's leading "
        "ones, on the input side"
    )


class Intruders(WithReasons):
    """Leading singular vectors of the tuned weight that resemble no singular vector of the base weight."""

    k: int = Field(
        description="number of leading singular vectors of the tuned weight that are looked at for intruders"
    )
    epsilon: Annotated[Finite, Meaning("cosine", "given")] = Field(
        description="cosine that an intruder stays below, in absolute value, with every singular vector of the base "
        "weight"
    )
    output: Annotated[int | None, _INTRUDERS] = Field(
        description="number of intruders among the `k` leading singular vectors of the tuned weight, on the output side"
    )
    input: Annotated[int | None, replace(_INTRUDERS, formula=_INTRUDERS.formula.replace("left", "right"))] = Field(
        description="number of intruders among the `k` leading singular vectors of the tuned weight, on the input side"
    )


class Rounding(WithReasons):
    """Effect that rounding can have on the singular values of a difference of two stored weights."""

    dtype: str = Field(description="dtype that the tuned weight is stored in")
    floor: Annotated[
        Finite,
        Meaning(
            "norm of dW",
            "estimate",
            how="from above, with rounding errors taken as independent",
            source="the norm of a matrix of independent errors, Bandeira & van Handel (2016)",
        ),
    ] = Field(
        description="spectral norm that rounding alone may give a change: of both weights to their stored dtypes, of "
        "the change (a product computed in the tuned weight's dtype, with sums in float32) before it was added, and "
        "the error of the singular values found here"
    )
    rank_above_floor: Annotated[int | None, Meaning("directions", "estimate", how="from floor")] = Field(
        description="number of the change's singular values above `floor`, which rounding did not make"
    )


class _OfParameter(WithReasons):
    """Base of results on one parameter."""

    name: str = Field(
        description="base model's module that holds the changed parameter; of a parameter outside of all modules its "
        "own name"
    )
    parameter: str = Field(description="name of the changed parameter in its module, such as weight or bias")

    @property
    def whole_name(self) -> str:
        """Name of the parameter in the files."""
        return self.name if self.name == self.parameter else f"{self.name}.{self.parameter}"


class ModuleChange(_OfParameter):
    """Change of one parameter of the base model; a stack of experts counts as a block-diagonal matrix."""

    kind: str = Field(
        description="kind of change: lora, dora, embedding lora, embedding dora, expert lora, adalora, ia3, loha, "
        "lokr, trainable tokens, saved, bias or full"
    )
    shape: list[int] = Field(description="shape of the changed parameter as the base stores it")
    rank: Annotated[int | None, Meaning("directions", "given", how="stated in the adapter")] = Field(
        description="rank of the change as the adapter states it, of a stack of experts for each; null where the "
        "method states none"
    )
    scaling: Annotated[Finite | None, Meaning("factor", "given", how="stated in the adapter", signed=True)] = Field(
        description="factor that the adapter multiplies B A by; null where the method has none"
    )
    relative_to: str = Field(
        description="weights that the change is relative to: 'base', or the initialisation that took a first B A out "
        "of the base, where that does not follow from the base's values"
    )
    frobenius_norm: Annotated[Finite | None, Meaning("norm of dW", "exact", formula="|dW|_F")] = Field(
        description="Frobenius norm of the change of one parameter"
    )
    relative_frobenius: Annotated[Finite | None, Meaning("relative", "exact", formula="|dW|_F / |W|_F")] = Field(
        description="Frobenius norm of the change of one parameter, relative to that of the base parameter"
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
    ] = Field(description="largest singular value of the change of one parameter")
    numerical_rank: Annotated[int | None, Meaning("directions", "exact")] = Field(
        description="number of singular values of the change above max(shape) eps sigma_1; eps of float64 where the "
        "change is known by its factors, else of float32"
    )
    stable_rank: Annotated[
        Finite | None, Meaning("directions", "exact", how=_AS_SPECTRAL_NORM, formula="sum sigma^2 / sigma_1^2")
    ] = Field(
        description="number of directions that carry the change of one parameter, by energy relative to the largest"
    )
    entropy_rank: Annotated[
        Finite | None, Meaning("directions", "exact", formula="exp(-sum p ln p), p = sigma^2 / sum sigma^2")
    ] = Field(
        description="number of directions that carry the change of one parameter, by the entropy of their energies"
    )
    energy_rank_90: Annotated[
        int | None, Meaning("directions", "exact", formula="fewest directions with 90 % of sum sigma^2")
    ] = Field(description="fewest directions that hold 90 % of the change's energy, the sum of sigma^2")
    singular_values: Annotated[list[Finite] | None, Meaning("norm of dW", "exact", how=_AS_SPECTRAL_NORM)] = Field(
        description="leading singular values of the change of one parameter, at most 16"
    )
    alignment: Alignment | None = Field(
        description="overlap of the change's leading directions with the base weight's, by side, beside that of random "
        "directions"
    )
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
        description="largest norm that the change can add to the module's output at a token, for every possible input "
        "behind the norm in front; null without prompts, of a checkpoint, and where no unchanged norm is directly in "
        "front"
    )
    rounding: Rounding | None = Field(
        default=None,
        description="effect that rounding can have on the singular values of a tuned checkpoint's change; null of an "
        "adapter's, and of anything but a single matrix",
    )
    added_rows: int = Field(
        default=0,
        description="number of rows that the tuned parameter has beyond the base's (a resized vocabulary), below 0 "
        "where it has fewer; not in the norms",
    )


class KindChange(WithReasons):
    """All changed parameters of one kind together, such as the query projections of all blocks."""

    name: str = Field(
        description="name of the kind, what its parameters' names have in common: without 'weight', the number of the "
        "block and what stands in front of it, unless the model has several stacks; * for the numbers of experts"
    )
    parameters: Annotated[int, Meaning("count", "exact")] = Field(
        description="number of changed parameters of one kind"
    )
    blocks: list[int] = Field(
        description="numbers of the blocks that changed parameters of one kind are in, from 0; empty outside of blocks"
    )
    share: Annotated[
        Share | None, Meaning("share, 0 to 1", "exact", formula="sum |dW|_F^2 of the kind / sum |dW|_F^2 of all")
    ] = Field(
        description="share that one kind of parameters has in the whole change; the shares of all kinds add up to 1"
    )
    relative: Annotated[
        Finite | None, Meaning("relative", "exact", formula="sqrt(sum |dW|_F^2 / sum |W|_F^2), W of dW > 0")
    ] = Field(
        description="norm of all changes of one kind of parameters together, relative to that of the base weights that "
        "change; no mean of ratios"
    )
    relative_least: Annotated[Finite | None, Meaning("relative", "exact", formula="min |dW|_F / |W|_F")] = Field(
        description="change of the parameter of a kind that changes least, relative to its base weight"
    )
    relative_most: Annotated[Finite | None, Meaning("relative", "exact", formula="max |dW|_F / |W|_F")] = Field(
        description="change of the parameter of a kind that changes most, relative to its base weight"
    )
    most_in: Annotated[int | None, Meaning("number", "exact")] = Field(
        description="number of the block, from 0, whose parameter of a kind changes most relative to its base weight; "
        "null outside of blocks"
    )
    rank_limit: Annotated[int | None, Meaning("directions", "given", how="from what the adapter states")] = Field(
        description="number of directions that the adapter's factors allow a change, the most of a kind: the stated "
        "rank, of a stack of experts that of all experts together; null where factors alone bound not every change"
    )
    energy_rank_90_most: Annotated[int | None, Meaning("directions", "exact", formula="max of energy_rank_90")] = Field(
        description="fewest directions that hold 90 % of a change's sum of sigma^2, of the parameter of a kind that "
        "needs most"
    )
    with_intruders: Annotated[int | None, Meaning("count", "exact")] = Field(
        description="number of parameters of a kind that have intruders on the output side; null where that is not "
        "known of every one"
    )


class ModuleComparison(_OfParameter):
    """Comparison of two adapters' changes of one parameter; gauge, rank and the split of the scale do not matter."""

    cosine: Annotated[Finite | None, Meaning("-1 to 1", "exact", formula="<dW1, dW2> / (|dW1| |dW2|)", signed=True)] = (
        Field(description="cosine of two adapters' changes of one parameter, each taken as one vector")
    )
    distance: Annotated[Finite, Meaning("norm of dW", "exact", formula="|dW1 - dW2|_F")] = Field(
        description="norm of the difference of two adapters' changes of one parameter"
    )
    relative_distance: Annotated[
        Finite | None, Meaning("0 to 1", "exact", formula="|dW1 - dW2|_F / (|dW1|_F + |dW2|_F)")
    ] = Field(
        description="norm of the difference of two adapters' changes of one parameter, relative to the sum of the "
        "norms of both"
    )
    output_cosines: Annotated[list[Finite] | None, Meaning("0 to 1", "exact")] = Field(
        description="cosines of the principal angles between the output subspaces of two adapters' changes of one "
        "parameter, at most the 16 largest"
    )
    input_cosines: Annotated[list[Finite] | None, Meaning("0 to 1", "exact")] = Field(
        description="cosines of the principal angles between the input subspaces of two adapters' changes of one "
        "parameter, at most the 16 largest"
    )


class KindComparison(WithReasons):
    """Comparison of two adapters' changes of all parameters of one kind, each adapter's taken as one vector."""

    name: str = Field(description="name of the kind of parameters that is compared, as in `kinds`")
    parameters: Annotated[int, Meaning("count", "exact")] = Field(
        description="number of parameters of one kind that both adapters change"
    )
    cosine: Annotated[
        Finite | None, Meaning("-1 to 1", "exact", formula="sum <dW1, dW2> / (|all dW1| |all dW2|)", signed=True)
    ] = Field(
        description="cosine of two adapters' changes of all parameters of one kind, each taken as one vector; no mean "
        "of cosines"
    )
    cosine_least: Annotated[Finite | None, Meaning("-1 to 1", "exact", signed=True)] = Field(
        description="smallest cosine of two adapters' changes of one parameter, among those of a kind"
    )
    cosine_most: Annotated[Finite | None, Meaning("-1 to 1", "exact", signed=True)] = Field(
        description="largest cosine of two adapters' changes of one parameter, among those of a kind"
    )
    relative_distance: Annotated[
        Finite | None, Meaning("0 to 1", "exact", formula="|all dW1 - all dW2| / (|all dW1| + |all dW2|)")
    ] = Field(
        description="norm of the difference of two adapters' changes of all parameters of one kind, each taken as one "
        "vector, relative to the sum of the norms of both"
    )


class Comparison(WithReasons):
    """Comparison of the changes that two adapters make to one base."""

    other: str = Field(description="the second adapter, as it was named")
    modules: list[ModuleComparison] = Field(
        description="comparison of two adapters' changes of each parameter that both change"
    )
    kinds: list[KindComparison] = Field(
        default=[],
        description="comparison of two adapters' changes by kind of parameter, of those that both change; empty where "
        "one of them changes a parameter in several ways",
    )
    only_first: list[str] = Field(description="parameters that only the first adapter changes")
    only_second: list[str] = Field(description="parameters that only the second adapter changes")
    cosine: Annotated[
        Finite | None, Meaning("-1 to 1", "exact", formula="sum <dW1, dW2> / (|all dW1| |all dW2|)", signed=True)
    ] = Field(
        description="cosine of all changes of two adapters, each taken as one vector; null where one of them changes "
        "nothing"
    )
    agreeing: list[str] = Field(description="parameters whose changes by two adapters have a cosine above 0.5")
    opposing: list[str] = Field(description="parameters whose changes by two adapters have a cosine below -0.5")
