#!/usr/bin/env bash
# Train two groups of one rank, SIGKILL group 1 once both train, let it come back, print the report.
# usage: kill_and_rejoin.sh RUN_DIR [torchtitan flags]   (TITAN_FT_PYTHON: the interpreter to use)
# Exit status: 0 if group 1 was killed, contributed again, and all digests are equal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
run_dir=${1:?usage: kill_and_rejoin.sh RUN_DIR [torchtitan flags]}
shift

status=0
launch configs/llama3_debug.toml --replicas 2 --ranks-per-replica 1 --run-dir "$run_dir" \
    --chaos configs/chaos/kill_once.toml -- "$@" || status=$?
if ((status != 0)); then
    echo "kill_and_rejoin.sh: the job failed with status $status; its logs are in $run_dir/logs" >&2
    exit 1
fi
"$TITAN_FT_PYTHON" -m titan_ft report "$run_dir"
"$TITAN_FT_PYTHON" scripts/expect_rejoin.py "$run_dir"
