#!/usr/bin/env bash
# Change the pure modules one place at a time, and see whether their tests notice.
usage='usage: mutate.sh [NUMBER [SEED]]
Changes the modules of [tool.mutmut] in pyproject.toml one place at a time, and runs the tests that reach the place. All
changes without arguments; else NUMBER of them, drawn with SEED (0). Works in mutants/, which it removes first.
At the end it names the changes that no test noticed; `python -m mutmut show NAME` shows one.
Exit status: 0 all changes were tried, 1 the tests fail without any change, 2 bad usage.
Makes .venv first, which takes minutes; with TITAN_FT_PYTHON set nothing is installed.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
(($# <= 2)) || refuse "NUMBER and SEED are all that it takes, got $# arguments"
number NUMBER 1 "${1:-1}"
number SEED 0 "${2:-0}"
source scripts/setup_env.sh
mutmut() { "$TITAN_FT_PYTHON" -m mutmut "$@"; }
mutmut --version >/dev/null || refuse "mutmut must be installed: pip install -c constraints.txt -e '.[dev]'"

rm -rf mutants
if (($# == 0)); then
    mutmut run
    mutmut results
    exit
fi
# mutmut lists changes only after it has made them, and makes them only for a run: here of the smallest module.
mutmut run 'titan_ft.protocol.lr_policy.*' >/dev/null
mapfile -t drawn < <(mutmut results --all true | sed -E 's/^ *([^:]*):.*/\1/' | LC_ALL=C sort |
    shuf -n "$1" --random-source=<(yes "${2:-0}"))
mutmut run "${drawn[@]}"
