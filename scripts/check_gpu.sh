#!/usr/bin/env bash
# What only GPUs can tell of this project, on one machine and in minutes: two groups beside stock torchtitan (the same
# steps, step times, waits of the host), a SIGKILL and a heal over Gloo and NCCL, judged by titan-ft check; the tests that
# need a GPU. Prints a table to paste.
usage='usage: check_gpu.sh [options]
  --gpus N        GPUs to use: N / 2 for each of two groups, which share a single one  (all of this machine)
  --cpu           the same on the CPU, over Gloo alone; N is the number of ranks       (2)
  --config FILE   model and data, of which 300 steps take less than ten minutes        (configs/llama3_debug.toml)
  --work-dir DIR  folder of the runs, with figures.json                                (outputs/check-gpu-DATE)
Exit status: 0 every promise holds, 1 one does not, cannot be told or its run failed, 2 bad usage, or no GPU.'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/common.sh"

gpus="" cpu="" config="" work_dir=""
read_options "gpus config work-dir" "cpu" "$@"
((${#rest[@]} == 0)) || refuse "takes no torchtitan flags, got '${rest[*]}'; put them into the TOML of --config"
[[ -z $gpus ]] || number --gpus 1 "$gpus"
[[ -z $config || -f $config ]] || refuse "--config must be a TOML file, got '$config'"
work_dir=$(realpath -m -- "${work_dir:-$root/outputs/check-gpu-$(date +%Y%m%d-%H%M%S)}")
[[ ! -e $work_dir ]] || refuse "--work-dir must not exist yet, got '$work_dir'"
[[ $cpu ]] || has_gpu ||
    refuse "needs a GPU, and neither 'nvidia-smi -L' nor /dev/kfd shows one; --cpu runs the same on the CPU"
config=$(realpath -- "${config:-$root/configs/llama3_debug.toml}")
cd "$root"
source scripts/setup_env.sh
exec "$TITAN_FT_PYTHON" -m benchmarks.gpu --config "$config" --work-dir "$work_dir" ${gpus:+--gpus "$gpus"} ${cpu:+--cpu}
