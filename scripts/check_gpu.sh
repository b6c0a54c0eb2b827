#!/usr/bin/env bash
# What only GPUs can show of this project, on one machine and in less than ten minutes on one GPU: NCCL's collectives and
# reconfigurations, pinned memory, two groups beside stock torchtitan, SIGKILLs and heals over Gloo and NCCL, a recipe at
# size, the tests that need a GPU. Prints a table to paste; a row that needs more GPUs says so.
usage='usage: check_gpu.sh [options]
  --gpus N        GPUs to use: N / 2 for each of two groups, which share a single one  (all of this machine)
  --cpu           the training runs on the CPU, over Gloo alone; N is the number of ranks  (2)
  --small         fewer steps and less memory, where kernels are slow
  --config FILE   model and data of the runs                                           (configs/llama3_debug.toml)
  --recipe FILE   the run at size: ten steps                                           (configs/llama3_1b.toml)
  --work-dir DIR  folder of the runs, with figures.json                                (outputs/check-gpu-DATE)
Runs in the environment of TITAN_FT_PYTHON, whatever its torch is, else in .venv.
Exit status: 0 every promise holds, 1 one does not, cannot be told or its run failed, 2 bad usage, or no GPU.'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/common.sh"

gpus="" cpu="" small="" config="" recipe="" work_dir=""
read_options "gpus config recipe work-dir" "cpu small" "$@"
((${#rest[@]} == 0)) || refuse "takes no torchtitan flags, got '${rest[*]}'; put them into the TOML of --config"
[[ -z $gpus ]] || number --gpus 1 "$gpus"
[[ -z $config || -f $config ]] || refuse "--config must be a TOML file, got '$config'"
[[ -z $recipe || -f $recipe ]] || refuse "--recipe must be a TOML file, got '$recipe'"
work_dir=$(realpath -m -- "${work_dir:-$root/outputs/check-gpu-$(date +%Y%m%d-%H%M%S)}")
[[ ! -e $work_dir ]] || refuse "--work-dir must not exist yet, got '$work_dir'"
[[ $cpu ]] || has_gpu ||
    refuse "needs a GPU, and $gpu_witness finds none; --cpu has the training runs on the CPU"
config=$(realpath -- "${config:-$root/configs/llama3_debug.toml}")
recipe=$(realpath -- "${recipe:-$root/configs/llama3_1b.toml}")
cd "$root"
source scripts/setup_env.sh
exec "$TITAN_FT_PYTHON" -m benchmarks.gpu --config "$config" --recipe "$recipe" --work-dir "$work_dir" \
    ${gpus:+--gpus "$gpus"} ${cpu:+--cpu} ${small:+--small}
