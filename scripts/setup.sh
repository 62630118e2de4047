#!/usr/bin/env bash
# Makes .venv and installs duat in it. An optional argument names what to install instead: ".[dev]".
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
# Named by its release, torch comes as the build for this machine where several are offered.
.venv/bin/python -c "import torch" 2>/dev/null || .venv/bin/pip install --quiet "${DUAT_TORCH:-torch==2.13.0}"
.venv/bin/pip install --quiet --editable "${1:-.}"
