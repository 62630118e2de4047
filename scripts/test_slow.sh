#!/usr/bin/env bash
# The tests that scripts/test.sh leaves out: they walk every model type, start several processes or fill memory.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "no .venv yet: bash scripts/test.sh makes it" >&2; exit 1; }
exec .venv/bin/python -m pytest --numprocesses "${DUAT_TEST_PROCESSES:-2}" --dist worksteal -m slow "$@"
