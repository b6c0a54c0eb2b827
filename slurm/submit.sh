#!/usr/bin/env bash
# Submit a run to Slurm: a lighthouse, and an array with one element for each replica group.
usage='usage: submit.sh --config CONFIG.toml --run-dir DIR --groups N --ranks-per-node M [options] [-- torchtitan flags]
  --nodes K               nodes of each group (1)
  --time T                time limit of the groups jobs; each leaves in order before, and is requeued (the partition'"'"'s)
  --standby               a second lighthouse, that takes over within seconds when the first one dies with its node
  --group-options "..."   more options of sbatch for the groups, such as "--partition=gpu --gpus-per-node=8"
  --lighthouse-options "..."  likewise for the lighthouses, such as "--partition=cpu --exclusive"
  --token-file FILE       the secret that all groups share, readable by you alone (made, as DIR/token)
  --max-restarts N        restarts of a group in 24 hours on its nodes (100)
  --host-deaths N         a group leaves a host on which groups of the run have died so often (5; 0: never)
  --host-window S         seconds within which they count (3600)
  --on-host-suspected "COMMAND"  run then, with the host and the reason as further arguments
  --no-zygote             start workers as new processes, not as forks of one that has imported everything
  --dry-run               print what would be submitted
DIR must be on storage that all nodes share. The environment of this shell goes along (TITAN_FT_PYTHON).'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/common.sh"

config="" run_dir="" groups="" ranks_per_node="" nodes=1 time="" group_options="" lighthouse_options="" token_file=""
max_restarts=100 host_deaths=5 host_window=3600 on_host_suspected="" standby="" no_zygote="" dry_run=""
read_options "config run-dir groups ranks-per-node nodes time group-options lighthouse-options token-file max-restarts \
    host-deaths host-window on-host-suspected" "dry-run standby no-zygote" "$@"
[[ -n $config ]] || refuse "--config is missing"
[[ -f $config ]] || refuse "--config must be a TOML file, got '$config'"
[[ -n $run_dir ]] || refuse "--run-dir is missing: a folder that all nodes share"
[[ -n $groups ]] || refuse "--groups is missing: the number of replica groups"
[[ -n $ranks_per_node ]] || refuse "--ranks-per-node is missing: as many as a node has GPUs"
number --groups 1 "$groups"
number --ranks-per-node 1 "$ranks_per_node"
number --nodes 1 "$nodes"
number --max-restarts 0 "$max_restarts"
number --host-deaths 0 "$host_deaths"
number --host-window 1 "$host_window"
[[ -n $dry_run ]] || command -v sbatch >/dev/null || refuse "sbatch is not there: run this where jobs are submitted"
config=$(realpath "$config")
[[ -n $dry_run ]] || mkdir -p "$run_dir/logs" "$run_dir/slurm"
run_dir=$(realpath -m "$run_dir")
token_file=${token_file:-$run_dir/token}

make_token() {
    if [[ ! -e $token_file ]]; then
        (umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$token_file")
    fi
    [[ $(stat -c %a "$token_file") == 600 || $(stat -c %a "$token_file") == 400 ]] ||
        refuse "--token-file must be readable by you alone, got mode $(stat -c %a "$token_file") of '$token_file'; chmod 600 it"
    [[ $token_file == "$run_dir/token" ]] || install -m 600 "$token_file" "$run_dir/token"
}

submit() { # arguments of sbatch; prints the job's id
    if [[ -n $dry_run ]]; then
        printf '%q ' sbatch "$@" >&2
        echo >&2
        echo JOB
    else
        sbatch --parsable "$@" | cut -d';' -f1
    fi
}

[[ -n $dry_run ]] || make_token
read -ra for_groups <<<"$group_options"
read -ra for_lighthouses <<<"$lighthouse_options"
[[ -z $time ]] || for_groups+=("--time=$time")
[[ -n $dry_run ]] || rm -f "$run_dir/slurm/jobs" "$run_dir"/slurm/exclude-* \
    "$run_dir/lighthouse.json" "$run_dir/finished.json"
lighthouse=(${for_lighthouses[@]+"${for_lighthouses[@]}"} "--output=$run_dir/logs/lighthouse-%j.log"
    "$root/slurm/lighthouse.sbatch" "$root" "$run_dir")
first=$(submit "${lighthouse[@]}")
lighthouses=("$first")
# What is left of a run that could not be submitted as a whole would wait for ever.
trap '[[ -n $dry_run ]] || scancel "${lighthouses[@]}"' EXIT
if [[ -n $standby ]]; then
    second=$(submit "${lighthouse[@]}")
    lighthouses+=("$second")
fi
job=$(submit "--dependency=after:$first" "--array=0-$((groups - 1))" "--nodes=$nodes" \
    ${for_groups[@]+"${for_groups[@]}"} "--output=$run_dir/logs/replica-%a.log" \
    "$root/slurm/replicas.sbatch" "$root" "$run_dir" --config "$config" --ranks-per-node "$ranks_per_node" \
    --max-restarts "$max_restarts" --host-deaths "$host_deaths" \
    --host-window "$host_window" --on-host-suspected "$on_host_suspected" \
    ${no_zygote:+--no-zygote} ${rest[@]+-- "${rest[@]}"})
trap - EXIT
[[ -z $dry_run ]] || exit 0
echo "$job ${lighthouses[*]}" >"$run_dir/slurm/jobs.part" && mv "$run_dir/slurm/jobs.part" "$run_dir/slurm/jobs"
cat <<END
groups: job $job, lighthouse: job ${lighthouses[*]}; output in $run_dir/logs
  titan-ft top $run_dir        watch it
  titan-ft check $run_dir      what holds, also while it runs
  titan-ft report $run_dir     figures and a page with plots
  scancel $job ${lighthouses[*]}        end it
END
