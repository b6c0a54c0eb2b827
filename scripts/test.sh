#!/usr/bin/env bash
# Set up and run the tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
# All of them two at a time, for most of their time they wait; which two, says tests/conftest.py.
(($#)) || set -- --numprocesses 2 --dist loadscope
exec "$TITAN_FT_PYTHON" -m pytest "$@"
