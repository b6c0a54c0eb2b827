#!/usr/bin/env bash
# Train under a fault each 15 s of a random kind, then judge the run and report on it. Needs only Python (3.11 to 3.13) and pip.
usage='usage: campaign.sh [options] [-- torchtitan flags]
  --minutes M     length of the run, from its first step          (20)
  --seed N        what all that is random follows from            (drawn, and printed)
  --groups N      replica groups                                  (4)
  --ranks M       ranks of each group                             (1)
  --run-dir DIR   folder of the run; DIR-reference for the other  (outputs/campaign-DATE)
  --plan FILE     the faults                                      (configs/chaos/campaign.toml)
  --config FILE   the job                                         (configs/llama3_debug.toml; above 8 groups its halved model)
  --semi-sync M   local_sgd or diloco, in rounds of 5 steps       (synchronous)
  --resume        go on for M minutes with the campaign in DIR, which was cut or is over; what is not given is as it was
  --resume-with NAME[,NAME]  of what is given, what may change the arithmetic or the data: as of titan-ft launch
  --reference     run once more for as long without faults, and compare the loss curves at equal tokens
Exit status: 0 every promise holds, 1 one does not or cannot be told or training failed, 2 bad usage or config.'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/common.sh"

minutes="" seed="" groups="" ranks="" run_dir="" plan="" config="" semi_sync="" resume="" resume_with="" reference=""
read_options "minutes seed groups ranks run-dir plan config semi-sync resume-with" "resume reference" "$@"

# What the campaign is, for --resume: a name and a value a line. `launches` counts, for each one draws faults of its own.
kept="seed groups ranks plan config semi_sync launches"
launches=""
[[ $resume || ! $resume_with ]] || refuse "--resume-with must come with --resume, got '$resume_with' alone"
if [[ $resume ]]; then
    [[ -n $run_dir ]] || refuse "--resume needs --run-dir: the folder of the campaign that is to go on"
    [[ -z $reference ]] || refuse "--reference must be left out with --resume: its length would be another one"
    [[ -f $run_dir/campaign ]] || refuse "--resume needs a campaign in --run-dir, got '$run_dir', which holds none"
    before=()
    while IFS== read -r name value; do
        if [[ $name == flag ]]; then
            before+=("$value")
        elif [[ " $kept " == *" $name "* && -z ${!name} ]]; then # what is given wins
            printf -v "$name" %s "$value"
        fi
    done <"$run_dir/campaign"
    rest=("${before[@]}" "${rest[@]}")
    number "launches in $run_dir/campaign" 0 "$launches"
fi
minutes=${minutes:-20} groups=${groups:-4} ranks=${ranks:-1}
# A fault each 15 s needs the time for a few of them, and for all groups to come back.
number --minutes 2 "$minutes"
number --groups 2 "$groups"
number --ranks 1 "$ranks"
seed=${seed:-$(((RANDOM << 15) | RANDOM))}
number --seed 0 "$seed"
[[ ${semi_sync:-diloco} =~ ^(diloco|local_sgd)$ ]] ||
    refuse "--semi-sync must be diloco or local_sgd, got '$semi_sync'; leave it out for the synchronous mode"
[[ -z $plan || -f $plan ]] || refuse "--plan must be a TOML file, got '$plan'"
[[ -z $config || -f $config ]] || refuse "--config must be a TOML file, got '$config'"
run_dir=$(realpath -m -- "${run_dir:-$root/outputs/campaign-$(date +%Y%m%d-%H%M%S)}")
plan=$(realpath -- "${plan:-$root/configs/chaos/campaign.toml}")
config=${config:+$(realpath -- "$config")}
for folder in "$run_dir" ${reference:+"$run_dir-reference"}; do
    [[ $resume || ! -e $folder || -z $(find "$folder" -mindepth 1 ! -path "$folder/campaign" -print -quit) ]] ||
        refuse "--run-dir must not hold another run, got '$folder'; give another folder, or go on in it with --resume"
done
cd "$root"
source scripts/setup_env.sh

# The same arithmetic with and without faults: the global batch holds while groups are away, and the LR is a function of
# the step alone, constant after the warm-up in as many steps as there may be. Faults are to be found within seconds: a
# deadlock by the watchdog, a flipped bit by the digests.
flags=(
    --fault_tolerance.digest_every=5
    --lr_scheduler.total_steps=100000
    --checkpoint.enable --checkpoint.interval=50 --checkpoint.keep_latest_k=2
    --training.steps=100000
)
if ((groups > 8)); then # so many share two cores: each gets a small model, and the time that its turn may take
    flags+=(--fault_tolerance.hang_timeout_seconds=120)
    [[ $config ]] || flags+=(--model.flavor=debugmodel_half --training.seq_len=128 --checkpoint.interval=10)
else
    flags+=(--fault_tolerance.hang_timeout_seconds=20)
fi
if [[ $semi_sync ]]; then # each group trains its own batches only
    flags+=(--fault_tolerance.semi_sync_method="$semi_sync" --fault_tolerance.sync_steps=5)
else
    flags+=(--fault_tolerance.batch_policy=constant)
fi
mkdir -p "$run_dir"
launches=$((${launches:-0} + 1))
{
    for name in $kept; do echo "$name=${!name}"; done
    for flag in "${rest[@]}"; do echo "flag=$flag"; done
} >"$run_dir/campaign.new"
[[ ! $resume ]] || cp "$run_dir/campaign" "$run_dir/campaign.before"
mv "$run_dir/campaign.new" "$run_dir/campaign"
fault_seed=$((seed + launches - 1))
echo "campaign.sh: seed $fault_seed, $minutes minutes, $groups groups x $ranks ranks; $run_dir"
job=("${config:-configs/llama3_debug.toml}" --replicas "$groups" --ranks-per-replica "$ranks")
status=0
launch "${job[@]}" --run-dir "$run_dir" --chaos "$plan" --chaos-seed "$fault_seed" --minutes "$minutes" \
    ${resume:+--resume} ${resume_with:+--resume-with "$resume_with"} -- \
    "${flags[@]}" --fault_tolerance.chaos "${rest[@]}" || status=$?
if ((status == 2)); then # refused: the next --resume goes on from what the campaign was
    [[ ! $resume ]] || mv "$run_dir/campaign.before" "$run_dir/campaign"
    exit 2
fi
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
echo "campaign.sh: seed $fault_seed; the report is $run_dir/report/index.html"
((verdict == 0)) || exit "$verdict"
exit "$status"
