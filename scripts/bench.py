"""What duat costs, as ratios measured side by side in one run.

    python scripts/bench.py                 all parts, a few minutes
    python scripts/bench.py speed memory    some of them, such as these
    python scripts/bench.py process --peer  with the nearest peer, installed into an environment of its own

speed    `inspect` on a 135M-parameter llama shape, 128 tokens, against one plain eager forward pass that returns
         attentions and hidden states
attribute `attribute` on the same shape, against one forward and one backward pass
compare  `compare` of two prompts on the same shape, against `inspect` of one
dense    the statistics of W' in closed form against W' written out, at MiniLM's size (N = 32)
memory   peak memory of `inspect` and `attribute` against the number of blocks, and of `inspect` at 2048 tokens
streamed `inspect` with weights read block by block against weights in memory, time, memory and numbers; checkpoints of
         135M and 1.1B parameters are made in the temporary folder (2.5 GB)
reading  the tensors of a 1.1B checkpoint from cold files, against `dd`
planned  memory and time as planned against what processes use, on the demo and a 135M shape, resident and streamed
many     `duat inspect --out`: prompts a second, of a small model also against a loop of bare capture, memory against
         the number of prompts, one process against two
criteria what duat's sets do to other text, against magnitude, activation x norm, Wanda-sp, FLAP, Taylor, HFPrune and
         ShortGPT at the same share of parameters; with --peer also torch-pruning, with --rounds also duat's sets of
         four rounds; --write puts the tables into configs/docs/pruning.md; a quarter of an hour, only when named
ranks    how well duat's prediction and other criteria rank terms by their measured damage, on the demo and MiniLM;
         --write puts the table into configs/docs/pruning.md; a quarter of an hour, only when named
prune    responses of all neurons and heads of all-MiniLM-L6-v2 against ablating each, its memory at 1B parameters, an
         ablation under a picture against a plain pass, and whole runs on the demo and a 135M shape against the time
         they may take on two cores
gpu      `inspect` of an 8B shape on a GPU against one plain forward pass, its GPU memory, planned and used, and a 70B
         shape through 8 GB of it; only when named (23 GB in the temporary folder)
process  `duat --help` and `duat inspect` as processes, against imports
check    the pre-flight of a large checkpoint, and `duat check --weights-only` against reading and summing the tensors
lora     `duat lora-diff --no-base` on an adapter of a 7B shape as a process, and its singular values against those of
         the dense product
large    `inspect` and `prune-bound` of a 7B shape, streamed; only with --large (13.5 GB in the temporary folder, 40
         minutes)
peer     `duat inspect` as a process against InterpKit's `decompose`; only with --peer
direct   direct parts of `attribute` against TransformerLens on tiny gpt2 and llama; only with --peer
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from benchmarks.attribute import attribute
from benchmarks.check import check
from benchmarks.common import Row
from benchmarks.compare import compare
from benchmarks.criteria.part import criteria
from benchmarks.dense import dense
from benchmarks.direct_peer import direct_peer
from benchmarks.gpu import gpu
from benchmarks.lora import lora
from benchmarks.many import captured_child, many
from benchmarks.memory import attribute_child, child, memory
from benchmarks.peer import peer
from benchmarks.planned import planned
from benchmarks.process import process
from benchmarks.prune import prune, prune_child
from benchmarks.ranks import ranks
from benchmarks.reading import reading, reading_child
from benchmarks.speed import speed
from benchmarks.streamed import large, streamed, streamed_child

PARTS: dict[str, Callable[[int], list[Row]]] = {
    "speed": speed,
    "attribute": attribute,
    "compare": compare,
    "dense": dense,
    "memory": memory,
    "streamed": streamed,
    "reading": reading,
    "planned": planned,
    "many": many,
    "prune": prune,
    "process": process,
    "lora": lora,
    "check": check,
    "criteria": criteria,
    "ranks": ranks,
    "gpu": gpu,
}
CHILDREN: dict[str, Callable[..., None]] = {
    "streamed": streamed_child,
    "captured": captured_child,
    "reading": reading_child,
    "attribute": lambda *sizes: attribute_child(*map(int, sizes)),
    "prune": prune_child,
    "inspect": lambda *sizes: child(*map(int, sizes)),
}
NAMED = {"criteria", "ranks", "gpu"}  # parts that run only when they are asked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="also compare with the nearest peer; installs it")
    parser.add_argument("--large", action="store_true", help="also a 7B shape; needs 13.5 GB of disk")
    parser.add_argument("--rounds", action="store_true", help="also sets of four rounds, in criteria")
    parser.add_argument("--write", action="store_true", help="write the tables of criteria and ranks into their page")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, *rest = arguments.child
        CHILDREN[what](*rest)
        return
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    parts = {name: PARTS[name] for name in arguments.parts or [one for one in PARTS if one not in NAMED]}
    if "criteria" in parts:
        rounds = 4 if arguments.rounds else 1
        parts["criteria"] = functools.partial(criteria, peer=arguments.peer, rounds=rounds, write=arguments.write)
    if "ranks" in parts:
        parts["ranks"] = functools.partial(ranks, write=arguments.write)
    if arguments.peer and list(parts) != ["criteria"]:
        parts |= {"peer": peer, "direct": direct_peer}
    parts |= {"large": large} if arguments.large else {}
    for name, part in parts.items():
        table = Table(title=name, title_justify="left")
        for column, justify in (("what", "left"), ("figure", "right"), ("unit", "left"), ("wanted", "left")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for row in part(arguments.runs):
            table.add_row(row.what, f"{row.value:.3g}", row.unit, row.limit)
        console.print(table)


if __name__ == "__main__":
    main()
