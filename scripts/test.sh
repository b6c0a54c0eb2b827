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
# All of them two at a time, for most of their time they wait; which two, says tests/conftest.py. Three at a time are a
# minute and a half faster on two cores, and tests of short faults then failed now and then.
(($#)) || set -- --numprocesses 2 --dist loadscope
exec "$TITAN_FT_PYTHON" -m pytest "$@"
