#!/usr/bin/env bash
# Runs every command once under the oldest libraries that pyproject.toml allows, torch apart, in an environment of its
# own inside .venv: it shares what is installed there, but for these and what they need in another version.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "no .venv yet: bash scripts/test.sh makes it" >&2; exit 1; }
floors="$(sed -nE '/^dependencies/,/^]/s/^ *"([a-z]+)>=([0-9.]+)",$/\1==\2/p' pyproject.toml | grep -v '^torch==')"
floor="$(sed -nE 's/^transformers==//p' <<< "$floors")"
oldest=.venv/oldest
[ -x "$oldest/bin/python" ] || .venv/bin/python -m venv "$oldest"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" | sed "s/.*/import site; site.addsitedir(r'&')/" \
    > "$("$oldest/bin/python" -c "$packages")/shared.pth"
"$oldest/bin/python" -m pip install --quiet --no-compile $floors
DUAT_OLDEST="$floor" exec "$oldest/bin/python" -m pytest -p no:cacheprovider tests/oldest tests/compat "$@"
