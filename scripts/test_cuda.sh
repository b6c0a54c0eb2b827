#!/usr/bin/env bash
# Run the tests of the GPU paths on torch's CUDA build, without a GPU: bash scripts/test_cuda.sh [--quick] [pytest arguments]
usage='usage: test_cuda.sh [--quick] [pytest arguments]
Runs the tests of the GPU paths on torch'"'"'s CUDA build, without a GPU, over a stand-in for CUDA and NCCL
(tests/cuda_stand_in). Makes .venv and .venv-cuda first (0.5 GB the first time).
  --quick   what takes five minutes on two cores
With pytest arguments: these tests alone.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
quick=""
[[ ${1:-} != --quick ]] || { quick=1; shift; }
source tests/cuda_stand_in/setup.sh || exit $(($? == 3 ? 0 : 1)) # 3 = no wheel: a line has said so
if (($#)); then
    exec "$STAND_IN_PYTHON" -m pytest "$@"
fi
"$STAND_IN_PYTHON" -m pytest tests/cuda -m "stand_in${quick:+ and not slow}"
