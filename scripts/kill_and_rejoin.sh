#!/usr/bin/env bash
# Train two groups of one rank, SIGKILL group 1 after a step, let it come back, print the report.
usage='usage: kill_and_rejoin.sh RUN_DIR [torchtitan flags]   (TITAN_FT_PYTHON: the interpreter to use)
Exit status: 0 if group 1 was killed, contributed again, and all digests are equal.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
run_dir=${1:?$usage}
shift

launcher="" killer=""
# shellcheck disable=SC2317  # called by the trap
stop() {
    # The launcher stops everything it started when it is asked to end.
    [[ -z $killer ]] || kill "$killer" 2>/dev/null || true
    [[ -z $launcher ]] || kill "$launcher" 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 130' INT TERM

"$TITAN_FT_PYTHON" -m titan_ft launch configs/llama3_debug.toml --replicas 2 --ranks-per-replica 1 \
    --run-dir "$run_dir" -- "$@" &
launcher=$!
"$TITAN_FT_PYTHON" scripts/kill_group.py "$run_dir" --replica 1 --at-step 30 &
killer=$!

status=0
wait "$launcher" || status=$?
launcher=""
if ((status != 0)); then
    echo "kill_and_rejoin.sh: the job failed with status $status; its logs are in $run_dir/logs" >&2
    exit 1
fi
kill_status=0
# The job is over: a killer that still waits for its step will never see it.
kill "$killer" 2>/dev/null || true
wait "$killer" || kill_status=$?
killer=""
if ((kill_status != 0)); then
    echo "kill_and_rejoin.sh: the job ended before group 1 was killed; give it more steps (--training.steps)" >&2
    exit 1
fi
"$TITAN_FT_PYTHON" -m titan_ft report "$run_dir"
"$TITAN_FT_PYTHON" scripts/expect_rejoin.py "$run_dir"
