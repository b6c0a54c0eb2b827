#!/usr/bin/env bash
# Simulate the protocol under many schedules of faults, on a virtual clock.
usage='usage: explore.sh --schedules N --seed S [--jobs J] [--kinds a,b] [--trace] [--replay JSON]
Simulates the protocol under N schedules of faults, from seed S on, on a virtual clock. --kinds: those of their faults;
--trace: what happens in them; --replay: one schedule, as a failure prints it.
Exit status: 0 every promise held, 1 one did not, 2 bad usage.
Makes .venv first, which takes minutes; with TITAN_FT_PYTHON set nothing is installed.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
source scripts/setup_env.sh
# The order of sets of strings is part of what a seed decides.
export PYTHONHASHSEED=0 OMP_NUM_THREADS=1
exec "$TITAN_FT_PYTHON" -m tests.simulation.explore "$@"
