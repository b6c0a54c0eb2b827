#!/usr/bin/env bash
# Run one replica group by torchrun, once on each of its nodes. What is not given is taken from Slurm's environment:
#
#   sbatch --array=0-7 --nodes=2 --gpus-per-node=8 --requeue --wrap \
#     'srun --ntasks-per-node=1 bash scripts/replica_group.sh --config CONFIG.toml --run-dir DIR --lighthouse http://ADDRESS:29510'
usage='usage: replica_group.sh --config CONFIG.toml --run-dir DIR [options] [-- torchtitan flags]
  --replica R          id of this group, from 0          (SLURM_ARRAY_TASK_ID)
  --replicas N         number of groups                  (SLURM_ARRAY_TASK_COUNT, else group_size of the config)
  --lighthouse URL     http://HOST:PORT, or file:PATH, the file of titan-ft lighthouse --announce
                                                         (TORCHFT_LIGHTHOUSE)
  --ranks-per-node M   processes on each node            (SLURM_GPUS_ON_NODE, SLURM_GPUS_PER_NODE, SLURM_NTASKS_PER_NODE)
  --nodes K            nodes of this group               (SLURM_NNODES, else 1)
  --rendezvous H:P     where the nodes of this group meet (first of SLURM_JOB_NODELIST; not needed for one node)
  --max-restarts N     restarts of the group in 24 hours (100)
  --metrics-port P     PORT or HOST:PORT of the first node, with the figures of the group for Prometheus (none)
  --host-deaths N      leave with exit status 4 when groups of the job have died so often on this host (0: never)
  --host-window S      seconds within which they count    (3600)
  --on-host-suspected "COMMAND"  run then, with the host and the reason as further arguments
  --no-zygote          start workers as new processes, not as forks of one that has imported everything
  --dry-run            print the torchrun command and end
TITAN_FT_TOKEN, the secret that all groups share, must be set unless every address is on this host.'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/common.sh"

# Slurm writes "8", "h100:8", or "4(x2)".
slurm_count() {
    local count=${1##*:}
    echo "${count%%(*}"
}

first_host() { # a Slurm node list such as node[03-07,09],other1
    local names
    # It may be there without a configuration, as in a container.
    if names=$(scontrol show hostnames "$1" 2>/dev/null) && [[ -n $names ]]; then
        echo "${names%%$'\n'*}"
    else
        sed -E 's/^([^],[]*)\[([0-9]+)[^]]*\]([^,]*).*/\1\2\3/; s/,.*//' <<<"$1"
    fi
}

is_loopback() { # HOST:PORT, with or without http://
    local host=${1#*://}
    host=${host%%/*}
    [[ $host =~ ^(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?$ ]]
}

config="" run_dir="" dry_run="" no_zygote=""
replica=${SLURM_ARRAY_TASK_ID:-}
replicas=${SLURM_ARRAY_TASK_COUNT:-}
lighthouse=${TORCHFT_LIGHTHOUSE:-}
ranks_per_node=$(slurm_count "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-}}}")
nodes=${SLURM_NNODES:-1}
rendezvous=""
max_restarts=100
metrics_port=""
host_deaths=0 host_window=3600 on_host_suspected=""
read_options "config run-dir replica replicas lighthouse ranks-per-node nodes rendezvous max-restarts metrics-port
    host-deaths host-window on-host-suspected" "dry-run no-zygote" "$@"

[[ -n $config ]] || refuse "--config is missing"
[[ -f $config ]] || refuse "--config must be a TOML file, got '$config'"
[[ -n $run_dir ]] || refuse "--run-dir is missing: a folder that all groups share"
[[ -n $replica ]] || refuse "--replica is missing, and SLURM_ARRAY_TASK_ID is not set"
[[ -n $lighthouse ]] || refuse "--lighthouse is missing, and TORCHFT_LIGHTHOUSE is not set"
[[ $lighthouse =~ ^(http://[^/]+:[0-9]+/?|file:/.+)$ ]] ||
    refuse "--lighthouse must be http://HOST:PORT or file:PATH with an absolute path, got '$lighthouse'"
[[ -n $ranks_per_node ]] || refuse "--ranks-per-node is missing, and Slurm names no GPUs or tasks per node"
number --replica 0 "$replica"
number --ranks-per-node 1 "$ranks_per_node"
number --nodes 1 "$nodes"
number --max-restarts 0 "$max_restarts"
number --host-deaths 0 "$host_deaths"
number --host-window 1 "$host_window"
group=(--fault_tolerance.enable "--fault_tolerance.replica_id=$replica")
if [[ -n $replicas ]]; then
    number --replicas 1 "$replicas"
    ((10#$replica < 10#$replicas)) ||
        refuse "--replica must be below --replicas ($replicas), got $replica (a Slurm array starts at 0: --array=0-$((replicas - 1)))"
    group+=("--fault_tolerance.group_size=$replicas")
fi

if ((nodes == 1)); then
    rendezvous_flags=(--standalone)
else
    if [[ -z $rendezvous ]]; then
        [[ -n ${SLURM_JOB_NODELIST:-} ]] ||
            refuse "--rendezvous is missing for $nodes nodes, and SLURM_JOB_NODELIST is not set"
        # The job id keeps groups apart that share a first host.
        rendezvous=$(first_host "$SLURM_JOB_NODELIST"):$((20000 + ${SLURM_JOB_ID:-0} % 10000))
    fi
    [[ $rendezvous =~ ^[^:]+:[0-9]+$ ]] || refuse "--rendezvous must be HOST:PORT, got '$rendezvous'"
    rendezvous_flags=(--rdzv-backend=c10d "--rdzv-endpoint=$rendezvous"
        "--rdzv-id=titan_ft-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}-$replica")
fi
if [[ -z ${TITAN_FT_TOKEN:-} ]] && { ! is_loopback "$lighthouse" || { ((nodes > 1)) && ! is_loopback "$rendezvous"; }; }; then
    refuse "TITAN_FT_TOKEN must be set, to the same secret for all groups: without it any host on the network could hand out weights"
fi

python=${TITAN_FT_PYTHON:-$root/.venv/bin/python}
command=("$python" -m titan_ft.launch.torchrun "--nnodes=$nodes" "--nproc-per-node=$ranks_per_node" "${rendezvous_flags[@]}"
    "--max-restarts=$max_restarts" -m titan_ft.train "--job.config_file=$config" "--job.dump_folder=$run_dir"
    --metrics.save_tb_folder=tb "${group[@]}" "${rest[@]}")
# As titan-ft launch sets them: torchft's log at its default level costs time in each step. A restarted group needs a
# store of its own: in the agent's it would read the addresses of its dead predecessors (pytorch issue 135712).
environment=("TORCHFT_LIGHTHOUSE=$lighthouse" "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
    "PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}" "RUST_LOG=${RUST_LOG:-warn}" ${metrics_port:+"TITAN_FT_METRICS_PORT=$metrics_port"})
[[ -z $no_zygote ]] || environment+=("TITAN_FT_ZYGOTE=0")
if ((host_deaths > 0)); then
    environment+=("TITAN_FT_HOST_DEATHS=$host_deaths" "TITAN_FT_HOST_WINDOW=$host_window"
        "TITAN_FT_ON_HOST_SUSPECTED=$on_host_suspected")
fi
if [[ -n $dry_run ]]; then
    printf '%q ' "${environment[@]}" "${command[@]}"
    echo
    exit 0
fi
command -v "$python" >/dev/null || refuse "no $python; run scripts/setup_env.sh first, or set TITAN_FT_PYTHON"
exec env "${environment[@]}" "${command[@]}"
