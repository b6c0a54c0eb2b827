# shellcheck shell=bash
# For the batch scripts, which have set run_dir. The file RUN_DIR/slurm/jobs has the ids of the run's jobs: that of the
# groups' array, then those of the lighthouses.

host_suspected=4 # exit status of a group that should go on on another host, see titan_ft/launch/restart_policy.py

pause() { sleep "${TITAN_FT_SLURM_SECONDS:-5}"; }

groups_are_over() {
    local groups said
    read -r groups _ 2>/dev/null <"$run_dir/slurm/jobs" || return 1 # they are being submitted
    if said=$(squeue --noheader --jobs="$groups" 2>&1); then
        [[ -z $said ]]
    else
        [[ $said == *"Invalid job id"* ]] # forgotten; anything else says that Slurm has no answer now
    fi
}

# Called before a job's list is changed for the first time.
save_own_exclusion() { # id and name of the job
    local file=$run_dir/slurm/exclude-$1-own said
    [[ ! -f $file ]] || return 0
    said=$(scontrol show job "$2") || return
    [[ $said =~ ExcNodeList=([^[:space:]]*) ]] || return
    echo "${BASH_REMATCH[1]#(null)}" >"$file"
}

# The hosts that the user excludes, and those that are suspected at this time: the file has a host and until when, a line
# each. Fails where there is no such file.
exclude_suspected() { # id and name of the job
    local file=$run_dir/slurm/exclude-$1 hosts
    [[ -f $file ]] || return
    hosts=$({
        cat "$file-own" 2>/dev/null
        awk -v now="$(date +%s)" '$2 > now { print $1 }' "$file" | sort -u
    } | grep . | paste -sd,)
    scontrol update JobId="$2" ExcNodeList="$hosts"
}

# A requeued job waits until the credentials of its earlier life have expired on its node, for two minutes (AuthInfo's
# cred_expire in slurm.conf): that node refuses older ones, and the job would fail. New ones are as good when they are
# later by more than hosts' clocks differ, and then its owner may have it started; and elsewhere, too.
hasten_requeued() {
    local jobs id name submitted reason
    jobs=$(tr ' ' ',' 2>/dev/null <"$run_dir/slurm/jobs") || return 0
    squeue --noheader --array --jobs="$jobs" --states=PENDING --format='%A %i %V %r' 2>/dev/null | while read -r id name submitted reason; do
        (($(date +%s) - $(date -d "$submitted" +%s) >= ${TITAN_FT_REQUEUE_SECONDS:-10})) || continue
        if [[ $reason == job?requeued?in?held?state ]]; then # by replicas.sbatch, and not held by anybody
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
