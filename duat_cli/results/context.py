"""What demonstrations in front of a question do: `duat compare --shared --prefix --answer`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from duat_cli.results.base import Finite, Result, WithReasons
from duat_cli.results.meaning import Meaning

_READ = "sum over question i and demonstration j of |B_ij|_F^2 / sum over question i and all j of it"
_LOSS = "mean over the answer's tokens of -ln p(token | all in front of it)"


class BlockRead(WithReasons):
    """One block's reading of one demonstration."""

    index: int = Field(description="number of the block, from 0")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=_READ, source="Eq. 10")] = Field(
        description="how much of W' on the question's tokens reads the demonstration"
    )
    null: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"{_READ}; H uniform")] = Field(
        description="the same share with uniform attention: what length, mask and scales alone make"
    )


class ContextRead(WithReasons):
    """One demonstration in one run."""

    demonstration: int = Field(description="number of the --prefix, from 1")
    tokens: int = Field(description="how many tokens it has there")
    share: Annotated[Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}")] = Field(
        description="how much of W' on the question reads it, mean over the blocks that have a W'"
    )
    null: Annotated[
        Finite | None, Meaning("share, 0 to 1", "exact", formula=f"mean over blocks of: {_READ}; H uniform")
    ] = Field(description="the same share with uniform attention")
    blocks: list[BlockRead]


class ContextRun(WithReasons):
    """The question behind some demonstrations, or behind none."""

    prompt: int = Field(description="number of the prompt, from 0")
    label: str = Field(description="which demonstrations stand in front of the question")
    loss: Annotated[Finite | None, Meaning("nats a token", "exact", formula=_LOSS)] = Field(
        description="mean negative log likelihood of the answer's tokens, nats"
    )
    loss_change: Annotated[
        Finite | None, Meaning("nats a token", "exact", formula="loss - loss without demonstrations", signed=True)
    ] = Field(description="loss less that without demonstrations; below 0 they help")
    bias: Annotated[
        Finite | None,
        Meaning(
            "relative",
            "exact",
            formula="mean over blocks of |b'_{j,2} - b'_{j,2} without demonstrations| / |the latter|, on the question",
            source="Eq. 12, 34; section 4.2",
        ),
    ] = Field(description="how far they move b'_{j,2} on the question, mean over the blocks where it is defined")
    reads: list[ContextRead] = Field(description="of each demonstration in front of the question")


class InContext(Result):
    """In-context learning (section 4.2): what demonstrations do to the answer, to W' and to b'_{j,2}."""

    question_tokens: int = Field(description="tokens of the question")
    answer_tokens: int = Field(description="tokens of the answer")
    runs: list[ContextRun] = Field(description="none, each, and all of the demonstrations")
