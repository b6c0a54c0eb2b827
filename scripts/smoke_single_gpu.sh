#!/usr/bin/env bash
# Two groups share one GPU, with Gloo between them: a kill, a rejoin, a report.
# Arguments are torchtitan flags: bash scripts/smoke_single_gpu.sh --training.steps=60
usage='usage: smoke_single_gpu.sh [torchtitan flags, such as --training.steps=60]
Two groups share one GPU, with Gloo between them: a kill, a rejoin, a report.
Makes .venv first, which takes minutes; with TITAN_FT_PYTHON set nothing is installed.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
source scripts/common.sh
help_first "$@"

instead="on a machine without one run scripts/quickstart.sh"
has_gpu || refuse "needs a GPU, and $gpu_witness finds none; $instead"
source scripts/setup_env.sh
has_gpu || refuse "needs a GPU, and $gpu_witness finds none (a build for CPU, or for another driver); $instead"

# One GPU for both groups, also where the machine has several.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
exec bash scripts/kill_and_rejoin.sh "outputs/smoke-single-gpu-$(date +%Y%m%d-%H%M%S)" \
    --fault_tolerance.process_group=gloo "$@"
