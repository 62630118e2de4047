"""Notes of the report of `duat prune-bound`."""

from __future__ import annotations

import sample_reports as sample

from duat_cli.report.tables.page import Page
from duat_cli.report.tables.prune.report import render_prune


def test_heads_that_share_a_key_and_value_head_are_told_by_block_where_blocks_differ() -> None:
    report = sample.prune_report()
    heads = report.blocks[0].heads
    assert heads is not None
    assert (heads.count, heads.kv_heads) == (9, 3)
    share = "Heads 0-2, and so on by 3, share a key and value head, which stays while one of them does"
    assert f"{share}." in render_prune(report, Page(120))
    mixer = report.blocks[0].model_copy(update={"heads": heads.model_copy(update={"kv_heads": 9})})
    other = report.model_copy(update={"blocks": [mixer, *report.blocks[1:]]})
    alike = [block.index for block in report.blocks[1:] if block.heads]
    where = f"block {alike[0]}" if len(alike) == 1 else f"blocks {alike[0]}"
    assert f"{share} ({where}" in render_prune(other, Page(160))
