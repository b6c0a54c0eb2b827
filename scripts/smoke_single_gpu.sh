#!/usr/bin/env bash
# Two groups share one GPU, with Gloo between them: a kill, a rejoin, a report.
# Arguments are torchtitan flags: bash scripts/smoke_single_gpu.sh --training.steps=60
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "smoke_single_gpu.sh: needs a GPU, and $1; on a machine without one run scripts/quickstart.sh" >&2
    exit 2
}

# Before the set-up, so that a machine without a GPU does not wait for a download to be told so.
if [[ ! -e /dev/kfd ]] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    refuse "neither 'nvidia-smi -L' nor /dev/kfd shows one"
fi
source scripts/setup_env.sh
"$TITAN_FT_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    refuse "the torch of $TITAN_FT_PYTHON cannot use it (a build for CPU, or for another driver)"

# One GPU for both groups, also where the machine has several.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
exec bash scripts/kill_and_rejoin.sh "outputs/smoke-single-gpu-$(date +%Y%m%d-%H%M%S)" \
    --fault_tolerance.process_group=gloo "$@"
