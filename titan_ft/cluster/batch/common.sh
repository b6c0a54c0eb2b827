# shellcheck shell=bash
# Functions of the batch scripts. They read the variable run_dir of the script. The file RUN_DIR/slurm/jobs has the ids
# of the run's jobs: the groups' array, then the lighthouses.

host_suspected=4 # exit status of a group that leaves a suspected host, see titan_ft/launch/restart_policy.py

pause() { sleep "${TITAN_FT_SLURM_SECONDS:-5}"; }

groups_are_over() {
    local groups said
    read -r groups _ 2>/dev/null <"$run_dir/slurm/jobs" || return 1 # the groups are being submitted
    if said=$(squeue --noheader --jobs="$groups" 2>&1); then
        [[ -z $said ]]
    else
        # Slurm has forgotten the job. After any other error, the groups may still run.
        [[ $said == *"Invalid job id"* ]]
    fi
}

# Saves the hosts that the user excludes, before `exclude_suspected` changes the job's list for the first time.
save_own_exclusion() { # id and name of the job
    local file=$run_dir/slurm/exclude-$1-own said
    [[ ! -f $file ]] || return 0
    said=$(scontrol show job "$2") || return
    [[ $said =~ ExcNodeList=([^[:space:]]*) ]] || return
    echo "${BASH_REMATCH[1]#(null)}" >"$file"
}

# Excludes the hosts that the user excludes, and the hosts that are suspected now. Each line of the file has a host and
# the end of its suspicion. Fails if no host of the job was ever suspected.
exclude_suspected() { # id and name of the job
    local file=$run_dir/slurm/exclude-$1 hosts
    [[ -f $file ]] || return
    hosts=$({
        cat "$file-own" 2>/dev/null
        awk -v now="$(date +%s)" '$2 > now { print $1 }' "$file" | sort -u
    } | grep . | paste -sd,)
    scontrol update JobId="$2" ExcNodeList="$hosts"
}

# Starts requeued jobs early. Slurm lets a requeued job wait for two minutes, until its former credentials have expired
# on its node (AuthInfo's cred_expire in slurm.conf): the node refuses older credentials, and the job would fail. New
# credentials are accepted as well once they are newer by more than the hosts' clocks differ. So the owner of the job
# may start it after some seconds, on this node or on another one.
hasten_requeued() {
    local jobs id name submitted reason
    jobs=$(tr ' ' ',' 2>/dev/null <"$run_dir/slurm/jobs") || return 0
    squeue --noheader --array --jobs="$jobs" --states=PENDING --format='%A %i %V %r' 2>/dev/null | while read -r id name submitted reason; do
        (($(date +%s) - $(date -d "$submitted" +%s) >= ${TITAN_FT_REQUEUE_SECONDS:-10})) || continue
        if [[ $reason == job?requeued?in?held?state ]]; then # by replicas.sbatch, not by a user's hold
            exclude_suspected "$id" "$name" && scontrol release "$name"
        elif [[ $reason == BeginTime ]]; then
            exclude_suspected "$id" "$name"
            scontrol update JobId="$name" StartTime=now
        fi
    done
    return 0
}

keep_jobs() {
    while pause; do hasten_requeued; done
}
