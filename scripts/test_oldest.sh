#!/usr/bin/env bash
# Runs every command once under the oldest transformers that pyproject.toml allows, in an environment of its own inside
# .venv: it shares what is installed there, but for transformers and what that release needs in another version.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "no .venv yet: bash scripts/test.sh makes it" >&2; exit 1; }
floor="$(sed -nE 's/^ *"transformers>=([0-9.]+)",$/\1/p' pyproject.toml)"
oldest=.venv/oldest
[ -x "$oldest/bin/python" ] || .venv/bin/python -m venv "$oldest"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" | sed "s/.*/import site; site.addsitedir(r'&')/" \
    > "$("$oldest/bin/python" -c "$packages")/shared.pth"
"$oldest/bin/python" -m pip install --quiet --no-compile "transformers==$floor"
DUAT_OLDEST="$floor" exec "$oldest/bin/python" -m pytest -p no:cacheprovider tests/oldest tests/compat "$@"
