"""Results on the parts of the paper's sum: what the input, the biases and the UAT terms make of a vector."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

_SUM = "Eq. 11/12, 33/34"
_PARTS = Meaning(exactness="exact", source="Eq. 12, 34", drift="group")
_TERMS = Meaning(exactness="exact", source=_SUM, drift="group")
_ENCODER = Meaning(exactness="exact", source="Eq. 11/12 with the encoder's states as a second input", checked=False)


class Part(WithReasons):
    share: Annotated[
        Finite | None, Meaning("share", "exact", formula="<part, x> / |x|^2", source=_SUM, signed=True, drift="number")
    ] = Field(
        description="share of a part in the vector that all parts add up to; those of the linear, static, dynamic and "
        "encoder part sum to 1"
    )
    norm: Annotated[
        Finite | None, Meaning("relative", "exact", formula="|part| / |x|", source=_SUM, drift="number")
    ] = Field(description="length of a part, relative to the vector that all parts add up to")
    token_median: Annotated[
        Finite | None,
        Meaning("share", "exact", formula="median over t of <part_t, x_t> / |x_t|^2", source=_SUM, signed=True),
    ] = Field(
        default=None,
        description="share of a part in the vector of a typical token: the median over the tokens t. In `share` tokens "
        "count by their squared norm, so that one with massive activations may make it alone. The medians of parts "
        "need not sum to 1. Null also in reports of old versions",
    )


class Parts(Result):
    """The paper's parts of what one block's FFN reads; each covers all blocks up to there, not one alone."""

    linear: Annotated[Part, _PARTS] = Field(
        description="part of what the FFN's nonlinearity reads that the linear path from x_0, the first block's input, "
        "makes"
    )
    static: Annotated[Part, _PARTS] = Field(
        description="part of what the FFN's nonlinearity reads that all biases make, output biases of earlier FFNs "
        "among them; carried by T, which the input sets, so that prompts differ in it as well"
    )
    dynamic: Annotated[Part, _PARTS] = Field(
        description="part of what the FFN's nonlinearity reads that the UAT terms in front of it make: their part of "
        "the bias b'_{j,2} of Eq. 12/34, whose rest W' b'_{j-1,3} + b is in `static`"
    )
    encoder: Annotated[Part | None, _ENCODER] = Field(
        default=None,
        description="part of what the FFN's nonlinearity reads that the encoder's states make or, with pictures in a "
        "text, what the vision part adds to the stream between blocks; null where there is neither",
    )


class Terms(WithReasons):
    """The paper's sum at one block's output: the parts of all blocks up to this one, and the block's own term."""

    linear: Annotated[Part, _TERMS] = Field(
        description="part of a block's output that the linear path from x_0, the first block's input, makes"
    )
    static: Annotated[Part, _TERMS] = Field(
        description="part of a block's output that all biases up to here make, carried by T, which the input sets"
    )
    dynamic: Annotated[Part, _TERMS] = Field(
        description="part of a block's output that the UAT terms of this block and all before it make"
    )
    encoder: Annotated[Part | None, _ENCODER] = Field(
        default=None,
        description="part of a block's output that the encoder's states make, through the cross-attention of this "
        "block and all before it, H held, whose biases are in `static`; with pictures in a text, what the vision part "
        "adds to the stream between blocks makes. Null where there is neither",
    )
    own: Annotated[Part, Meaning(exactness="exact", source=_SUM)] = Field(
        description="part of a block's output that its own UAT term U_j f_j makes: contained in `dynamic`, without the "
        "FFN's output bias"
    )
    largest_token: Annotated[
        Finite | None,
        Meaning("share, 0 to 1", "exact", formula="max over t of |x_t|^2 / |x|^2; 1 / N where tokens are alike"),
    ] = Field(
        default=None,
        description="share of the squared norm of a block's output that the token with the largest norm has: near 1 "
        "where that token's activations are massive, and then the parts' `share` is its own and `token_median` that of "
        "the others. Null also in reports of old versions",
    )
    pre_activation: Annotated[Parts | None, _PARTS] = Field(
        description="parts of what the FFN's first linear layer gives; of a mixture of experts, that of the expert "
        "that every token runs through. Null where no such layer is seen"
    )


class UatTerm(Result):
    """One term of the UAT sum at the last block's output, means over the prompts."""

    name: str = Field(
        description="name of a term of the UAT sum: 'x_0', 'bias', 'encoder', or the block whose FFN makes the term"
    )
    kind: Literal["linear", "static", "dynamic", "encoder"] = Field(
        description="part of the UAT sum that a term belongs to"
    )
    block: int | None = Field(description="number of the block whose FFN makes the term, from 0; null for other terms")
    share: Annotated[
        Finite, Meaning("share", "exact", formula="<term, x_L> / |x_L|^2", source="Eq. 11, 33", signed=True)
    ] = Field(description="share of a term in the last block's output; the shares of all terms sum to 1")
    norm: Annotated[Finite, Meaning("relative", "exact", formula="|term| / |x_L|", source="Eq. 11, 33")] = Field(
        description="length of a term, relative to the last block's output"
    )
    token_median: Annotated[
        Finite | None,
        Meaning(
            "share", "exact", formula="median over t of <term_t, x_Lt> / |x_Lt|^2", source="Eq. 11, 33", signed=True
        ),
    ] = Field(
        default=None,
        description="share of a term in the last block's output at a typical token: the median over the tokens t. Null "
        "in reports of old versions",
    )
