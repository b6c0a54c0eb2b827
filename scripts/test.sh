#!/usr/bin/env bash
# Set up and run the tests: bash scripts/test.sh [pytest arguments]
usage='usage: test.sh [pytest arguments]
Runs the tests: all but the slow ones without arguments; -m "" for all of them.
Makes .venv first, which takes minutes; with TITAN_FT_PYTHON set nothing is installed.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
source scripts/setup_env.sh
# All of them three at a time, for most of their time they wait; which three, says tests/conftest.py.
(($#)) || set -- --numprocesses 3 --dist loadscope
exec "$TITAN_FT_PYTHON" -m pytest "$@"
