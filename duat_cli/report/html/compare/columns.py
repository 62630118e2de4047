"""The columns of the tables, by their full names."""

from __future__ import annotations

from duat_cli.report.tables import numbers
from duat_cli.report.tables.grid import Column

OPERATOR = (
    Column(("change of W'", "%"), "operator.relative", numbers.percent),
    Column(("routing", "%"), "operator.routing", numbers.percent),
    Column(("scale", "%"), "operator.scale", numbers.percent),
    Column(("interaction", "%"), "operator.interaction", numbers.percent),
    Column(("null: uniform attention", "%"), "operator.null.relative", numbers.percent),
    Column(("certificate error", "relative"), "certificate_error", numbers.error),
)
HEADS = (
    Column(("whole change", "%"), "relative", numbers.percent),
    Column(("routing", "%"), "routing", numbers.percent),
    Column(("scale", "%"), "scale", numbers.percent),
    Column(("interaction", "%"), "interaction", numbers.percent),
    Column(("on unaligned tokens", "%"), "unaligned", numbers.percent),
)
UNALIGNED = (
    Column(("on unaligned tokens", "%"), "operator.unaligned", numbers.percent),
    Column(("null: uniform attention", "%"), "operator.null.unaligned", numbers.percent),
    Column(("of the first prompt", "%"), "operator.unaligned_a", numbers.percent),
    Column(("of the second", "%"), "operator.unaligned_b", numbers.percent),
)
STREAM = (
    Column(("input", "%"), "input", numbers.percent),
    Column(("bias b'", "%"), "bias", numbers.percent),
    Column(("FFN f", "%"), "ffn", numbers.percent),
    Column(("output", "%"), "output", numbers.percent),
)
AMPLIFICATION = (
    Column(("amplification", "times"), "amplification", numbers.plain),
    Column(("change of the input", "%"), "input", numbers.percent),
    Column(("change of the output", "%"), "output", numbers.percent),
)
FIXED = (
    Column(("loss", "nats a token"), "loss", numbers.plain),
    Column(("less live", "nats a token"), "change", numbers.signed(numbers.plain)),
    Column(("interval, from", "nats a token"), "low", numbers.signed(numbers.plain)),
    Column(("interval, to", "nats a token"), "high", numbers.signed(numbers.plain)),
)
CONTEXT = (
    Column(("loss of the answer", "nats a token"), "loss", numbers.plain),
    Column(("less that without", "nats a token"), "loss_change", numbers.signed(numbers.plain)),
    Column(("change of b'", "%"), "bias", numbers.percent),
)
READ = (
    Column(("W' reads", "%"), "share", numbers.percent),
    Column(("null: uniform attention", "%"), "null", numbers.percent),
)
