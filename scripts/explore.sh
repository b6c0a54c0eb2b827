#!/usr/bin/env bash
# Simulate the protocol under many schedules of faults, on a virtual clock: explore.sh --schedules N --seed S [--jobs J]
# [--kinds a,b] [--trace] [--replay JSON]; --help tells. Exit status: 0 every promise held, 1 one did not, 2 bad
# usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
# The order of sets of strings is part of what a seed decides.
export PYTHONHASHSEED=0 OMP_NUM_THREADS=1
exec "$TITAN_FT_PYTHON" -m tests.simulation.explore "$@"
