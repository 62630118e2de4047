"""Write configs/docs/coverage.md: every model type of the installed transformers, on tiny random models.

    python scripts/coverage.py [FILE]

FILE: the JSON of `duat support --all`, where that has run already.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "configs" / "docs" / "coverage.md"


def main(words: list[str]) -> None:
    from coverage_text import coverage

    from duat_cli import support
    from duat_cli.results.support import SupportReport

    report = SupportReport.model_validate_json(Path(words[0]).read_bytes()) if words else support(all_types=True)
    PAGE.write_text(coverage(report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
