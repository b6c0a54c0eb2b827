#!/usr/bin/env bash
# Train under a fault each 15 s of a random kind, then judge the run and report on it. Needs only Python 3.11 and pip.
usage='usage: campaign.sh [options] [-- torchtitan flags]
  --minutes M     length of the run, from its first step          (20)
  --seed N        what all that is random follows from            (drawn, and printed)
  --groups N      replica groups                                  (4)
  --ranks M       ranks of each group                             (1)
  --run-dir DIR   folder of the run; DIR-reference for the other  (outputs/campaign-DATE)
  --plan FILE     the faults                                      (configs/chaos/campaign.toml)
  --semi-sync M   local_sgd or diloco, in rounds of 5 steps       (synchronous)
  --reference     run once more for as long without faults, and compare the loss curves at equal tokens
Exit status: 0 every promise holds, 1 one does not or cannot be told or training failed, 2 bad usage or config.'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/common.sh"

minutes=20 seed="" groups=4 ranks=1 run_dir="" plan="" semi_sync="" reference=""
read_options "minutes seed groups ranks run-dir plan semi-sync" reference "$@"

# A fault each 15 s needs the time for a few of them, and for all groups to come back.
number --minutes 2 "$minutes"
number --groups 2 "$groups"
number --ranks 1 "$ranks"
seed=${seed:-$(((RANDOM << 15) | RANDOM))}
number --seed 0 "$seed"
[[ ${semi_sync:-diloco} =~ ^(diloco|local_sgd)$ ]] ||
    refuse "--semi-sync must be diloco or local_sgd, got '$semi_sync'; leave it out for the synchronous mode"
[[ -z $plan || -f $plan ]] || refuse "--plan must be a TOML file, got '$plan'"
run_dir=$(realpath -m -- "${run_dir:-$root/outputs/campaign-$(date +%Y%m%d-%H%M%S)}")
plan=$(realpath -- "${plan:-$root/configs/chaos/campaign.toml}")
for folder in "$run_dir" ${reference:+"$run_dir-reference"}; do
    [[ ! -e $folder ]] || refuse "--run-dir must not hold another run, got '$folder'; give another folder"
done
cd "$root"
source scripts/setup_env.sh

# The same arithmetic with and without faults: the global batch holds while groups are away, and the LR is a function of
# the step alone, constant after the warm-up in as many steps as there may be. Faults are to be found within seconds: a
# deadlock by the watchdog, a flipped bit by the digests.
flags=(
    --fault_tolerance.digest_every=5
    --fault_tolerance.hang_timeout_seconds=20
    --lr_scheduler.total_steps=100000
    --checkpoint.enable --checkpoint.interval=50 --checkpoint.keep_latest_k=2
    --training.steps=100000
)
if [[ $semi_sync ]]; then # each group trains its own batches only
    flags+=(--fault_tolerance.semi_sync_method="$semi_sync" --fault_tolerance.sync_steps=5)
else
    flags+=(--fault_tolerance.batch_policy=constant)
fi
echo "campaign.sh: seed $seed, $minutes minutes, $groups groups x $ranks ranks; $run_dir"
job=(configs/llama3_debug.toml --replicas "$groups" --ranks-per-replica "$ranks")
status=0
launch "${job[@]}" --run-dir "$run_dir" --chaos "$plan" --chaos-seed "$seed" --minutes "$minutes" \
    -- "${flags[@]}" --fault_tolerance.chaos "${rest[@]}" || status=$?
((status != 2)) || exit 2
if ((status != 0)); then
    echo "campaign.sh: the run did not end in order (status $status); its logs are in $run_dir/logs" >&2
fi

against=()
if [[ $reference ]]; then
    echo "campaign.sh: the same without faults; $run_dir-reference"
    if launch "${job[@]}" --run-dir "$run_dir-reference" --minutes "$minutes" -- "${flags[@]}" "${rest[@]}"; then
        against=(--against "$run_dir-reference")
    else
        echo "campaign.sh: the run without faults failed, so there is no comparison;" \
            "its logs are in $run_dir-reference/logs" >&2
        status=1
    fi
fi

verdict=0
"$TITAN_FT_PYTHON" -m titan_ft check "$run_dir" "${against[@]}" || verdict=$?
# Its page and its figures are worth having for a run that fails the check, too.
"$TITAN_FT_PYTHON" -m titan_ft report "$run_dir" || status=1
"$TITAN_FT_PYTHON" -m benchmarks.figures --expect-faults "$run_dir" ${against:+"$run_dir-reference"} || status=1
echo "campaign.sh: seed $seed; the report is $run_dir/report/index.html"
((verdict == 0)) || exit "$verdict"
exit "$status"
