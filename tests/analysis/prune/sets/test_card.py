"""The card of a written checkpoint: its own numbers first, the original's card below."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample_reports as sample

from duat_cli.analysis.prune.sets.card import ORIGINAL, ROUNDED_MEANS, card_of, write_card

FRONT = "---\nlicense: mit\ntags:\n- x\n---\n"


@pytest.mark.parametrize("original", [None, "# Ours\n135 M parameters\n", f"{FRONT}# Ours\n135 M parameters\n"])
def test_the_originals_card_stays_below_and_its_front_matter_on_top(original: str | None, tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    source.mkdir()
    written.mkdir()
    if original is not None:
        (source / "README.md").write_text(original)
        (written / "README.md").write_text("what was copied")
    report = sample.prune_report()
    write_card(written, source, report, sample.written(bare=False))
    text = (written / "README.md").read_text()
    assert [path.name for path in written.iterdir()] == ["README.md"]
    assert card_of(report, sample.written(bare=False)) in text
    assert "what was copied" not in text
    assert text.startswith(FRONT if original and original.startswith("---") else "# HuggingFaceTB/SmolLM2-135M, pruned")
    assert text.count("license: mit") == (1 if original and original.startswith("---") else 0)
    assert (ORIGINAL in text) is (original is not None)
    if original is not None:
        assert text.index(ORIGINAL) < text.index("# Ours\n135 M parameters")


def test_it_has_the_command_what_was_removed_and_what_it_costs() -> None:
    text = card_of(sample.prune_report(), sample.written(bare=False))
    assert "`duat prune-bound HuggingFaceTB/SmolLM2-135M --granularity neuron --metric kl" in text
    assert " --budget 0.1 --set 6020 --apply DIR`, with duat 0.1.0, torch " in text
    assert "| parameters | 134,515,008 | 124,148,160 |" in text
    assert "| perplexity | 31.42 | 33.07 |" in text
    assert "Removed: 6020 neurons: 198 neurons a block removed, 80 terms zeroed and still stored" in text
    assert "Damage on 83 held-out prompts: 0.0412 nats/token (mean over prompts" in text
    assert "Guaranteed with 99.9% confidence: at most 12.5% of prompts" in text
    rounded = card_of(sample.prune_report(), sample.written(bare=False).model_copy(update={"notes": [ROUNDED_MEANS]}))
    assert f"Not guaranteed to keep to the budget: {ROUNDED_MEANS}." in rounded
    assert "Guaranteed with" not in rounded
    other = card_of(sample.prune_report(), sample.written(bare=True).model_copy(update={"terms": 6021}))
    assert "Not guaranteed to keep to the budget." in other
    assert "perplexity" not in other
    assert "that chose the set, on which it looks better than it is" in other


def test_what_was_removed_agrees_with_its_number() -> None:
    one = sample.written(bare=False).model_copy(update={"granularity": "block", "terms": 1, "removed_blocks": [2]})
    assert "- Removed: block 2: " in card_of(sample.prune_report(), one)
    head = one.model_copy(update={"granularity": "head", "removed_blocks": []})
    assert "- Removed: one of the heads: " in card_of(sample.prune_report(), head)


def test_a_local_folder_is_named_by_its_last_part() -> None:
    report = sample.prune_report()
    model = report.model.model_copy(update={"name": "/home/me/models/mine", "revision": None})
    text = card_of(report.model_copy(update={"model": model}), sample.written(bare=False))
    assert text.startswith("# mine, pruned")
    assert "/home" not in text
