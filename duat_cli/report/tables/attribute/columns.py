"""Columns of attributed and of removed parts, for tables and HTML pages."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column
from duat_cli.report.tables.numbers import SIGNED

HEADS = [
    Column(("direct",), "value", SIGNED, ("written", "logits")),
    Column(("moved",), "moved", SIGNED, ("moved", "logits")),
]
INNER = [
    Column(("total",), "value", SIGNED, ("part", "logits")),
    Column(("direct",), "direct", SIGNED, ("straight to the output", "logits")),
]
STATES = [
    Column(("total",), "value", SIGNED, ("what its state brings", "logits")),
    Column(("direct",), "direct", SIGNED, ("of it straight to the output", "logits")),
]
REMOVED = [
    Column(("part",), "part", SIGNED, ("part", "logits")),
    Column(("lost",), "change", SIGNED, ("lost without it", "logits")),
    Column(("KL",), "kl", numbers.plain, ("KL", "nats")),
]
REMOVED_HEADS = [Column(("moved",), "part", SIGNED), Column(("direct",), "direct", SIGNED), *REMOVED[1:]]
REMOVED_TOKENS = [
    REMOVED[0],
    Column(("cut",), "cut", SIGNED, ("lost, attention cut", "logits")),
    Column(("KL",), "cut_kl", numbers.plain, ("KL", "nats")),
    Column(("replaced",), "replaced", SIGNED, ("lost, replaced", "logits")),
    Column(("KL",), "replaced_kl", numbers.plain, ("KL", "nats")),
]
SPREAD = [
    Column(("mean",), "mean", SIGNED, ("mean part", "logits")),
    Column(("mean |part|",), "mean_absolute", numbers.plain, ("mean of |part|", "logits")),
    Column(("deviation",), "deviation", numbers.plain, ("standard deviation", "logits")),
]
SOURCES = [Column(("all tokens together",), "value", SIGNED, ("all tokens together", "logits"))]

TABLES = {
    "attribution[].direct.heads[].": HEADS,
    "attribution[].parts.neurons[].": INNER,
    "attribution[].parts.experts[].": INNER,
    "attribution[].direct.neurons[].": INNER,
    "attribution[].direct.experts[].": INNER,
    "attribution[].parts.encoder.tokens[].": STATES,
    "attribution[].measured.heads[].": REMOVED_HEADS,
    "attribution[].measured.neurons[].": REMOVED,
    "attribution[].measured.tokens[].": REMOVED_TOKENS,
    "continuations[].sources[].": SOURCES,
    "summary.heads[].": SPREAD,
    "summary.neurons[].": SPREAD,
}
