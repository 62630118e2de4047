"""Rules that need the model: tensors left over by the load, and whether the DUAT form gives the model's own output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from duat_cli.checks.places import BlockPlace, block_of, config_of_blocks, depth_field
from duat_cli.checks.rule import Evidence, Measurement, Rule, Settings
from duat_cli.errors import needed
from duat_cli.grouping import by_key
from duat_cli.text import listed, plural, shown

_AHEAD = "num_nextn_predict_layers"


def _unexpected(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Unused tensors. They are grave if they are whole blocks of a used stack: then config.json has a wrong depth."""
    names = set(evidence.unexpected or ())
    for stack, blocks in _unused_blocks(evidence, names).items():
        own = sorted(name for name in names if (place := block_of(name)) and place[0] in blocks)
        names -= set(own)
        field, stated = depth_field(evidence.files.config) or ("the number of blocks", 0)
        held = len({p[0] for n in evidence.files.tensors if (p := block_of(n)) and p[0].stack == stack})
        said = f"config.json says {field} {stated}, the files hold {plural(held, 'block')}"
        text = f"{said} ({shown(stack)}): {plural(len(own), 'unused tensor')}: {listed(own)}"
        ahead = config_of_blocks(evidence.files.config).get(_AHEAD)  # blocks that predict several tokens ahead
        yield Measurement(len(own), text, where=own[0], grave=ahead != len(blocks))
    if names:
        text = f"{plural(len(names), 'unexpected tensor')}, unused by the model: {listed(list(names))}"
        yield Measurement(len(names), text, where=min(names))


def _unused_blocks(evidence: Evidence, names: set[str]) -> dict[str, list[BlockPlace]]:
    """Stack -> its blocks without a used tensor, for stacks with some block that is used."""
    held = by_key((place[0], name) for name in evidence.files.tensors if (place := block_of(name)))
    unused = {place for place, own in held.items() if names.issuperset(own)}
    used = {place.stack for place in set(held) - unused}
    return by_key((block.stack, block) for block in unused if block.stack in used)


def _missing(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Missing tensors. Those that matter are an error of the load, so these are only poolers behind the last block."""
    names = list(evidence.spare or ())
    if names:
        yield Measurement(len(names), f"{plural(len(names), 'tensor')} missing and taken as zero: {listed(names)}")


def _per_layer(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    for one in evidence.overrides or ():
        text = f"config.json declares {one.field} {shown(str(one.value))} of layer {one.layer}"
        where = f"per_layer_config.{one.layer}.{one.field}"
        if one.ignored is None:
            yield Measurement(0.0, f"{text}; not tried: {one.why}", one.layer, where, undefined="skip")
        elif one.ignored:
            yield Measurement(1, f"{text}, and the model ignores it: {one.why}", one.layer, where)
        else:
            yield Measurement(0, f"{text}, and the model obeys it", one.layer, where)


def _certificate(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Compares the certificate's errors with the policy's limit, else with the tolerance of the dtype."""
    report = needed(evidence.report)
    found = report.certificate
    limit = found.tolerance if settings.max is None else settings.max
    for block in report.blocks:
        text = f"the DUAT form of block {block.index} is off by {block.certificate_error:.1e}"
        where = f"blocks.{block.index}.certificate_error"
        yield Measurement(block.certificate_error, text, block.index, where, high=limit)
    text = f"the DUAT form is off by {found.relative_error:.1e} at most"
    yield Measurement(found.relative_error, text, where="certificate.relative_error", high=limit)
    text = f"duat's instruments move the output of the model by {found.plain_error:.1e}"
    yield Measurement(found.plain_error, text, where="certificate.plain_error", high=limit)


def _skipped(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    return [Measurement(1, f"{entry.what}: {entry.why}") for entry in needed(evidence.report).skipped]


def _range(evidence: Evidence, settings: Settings) -> Iterable[Measurement]:
    """Largest activations. Above the dtype's largest number they have the rule's level; near it they only warn."""
    for block in needed(evidence.report).blocks:
        found, where = block.range, f"blocks.{block.index}.range.share"
        what = f"block {block.index}'s activations (output: {found.place})"
        if found.share is None:
            why = found.reasons["share"]
            missed: Literal["fail", "pass"] = "fail" if found.largest_activation is None else "pass"
            yield Measurement(0.0, f"{what}: {why}", block.index, where, undefined=missed)
            continue
        text = f"{what} reach {found.largest_activation:.3g}, {found.share:.3g} of the largest {found.dtype}"
        yield Measurement(found.share, text, block.index, where, level=None if found.share > 1 else "warn")


RULES = [
    Rule(
        "integrity.unexpected",
        "tensors that the model's class does not use; an error where they make up whole blocks",
        "Remove them, or correct config.json: an unused tensor often is a renamed or a foreign one.",
        _unexpected,
        ("load",),
        level="warn",
        unit="tensors",
    ),
    Rule(
        "integrity.missing",
        "tensors that the files lack; those that matter are refused at the load",
        "Fetch the checkpoint again, or save it with all its tensors.",
        _missing,
        ("load",),
        level="warn",
        unit="tensors",
    ),
    Rule(
        "integrity.per_layer_config",
        "sizes, modules and skips that config.json declares of single layers and the model's code does not obey",
        "Remove per_layer_config, or load with code that obeys it: the model that runs is not the declared one.",
        _per_layer,
        ("load",),
        unit="overrides",
    ),
    Rule(
        "exactness.certificate",
        "relative error of the DUAT form against the model's own output, by default the tolerance of the dtype",
        "Run with --dtype float32; if it stays, report it: the numbers of this model are not to be relied on.",
        _certificate,
        ("report",),
        max=None,
        unit="relative",
    ),
    Rule(
        "exactness.range",
        "largest activation over the largest number of float16 or float8, where the checkpoint is loaded in it by "
        "config.json, or stored: above 1 an error, less beyond the limit a warning",
        "Store it in bfloat16 or float32, and let config.json say so: run in its own dtype, these activations become "
        "infinite.",
        _range,
        ("report",),
        max=0.5,
        unit="share",
    ),
    Rule(
        "exactness.skipped",
        "parts of the model that are outside the DUAT form",
        "Nothing is wrong with the checkpoint; these parts have no numbers that could be checked.",
        _skipped,
        ("report",),
        level="warn",
        unit="parts",
    ),
]
