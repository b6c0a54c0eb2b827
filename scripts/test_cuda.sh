#!/usr/bin/env bash
# Run the tests of the GPU paths on torch's CUDA build, without a GPU: bash scripts/test_cuda.sh [--torch RELEASE] [--quick] [pytest arguments]
usage='usage: test_cuda.sh [--torch RELEASE] [--quick] [pytest arguments]
Runs the tests of the GPU paths on torch'"'"'s CUDA build, without a GPU, over a stand-in for CUDA and NCCL
(tests/cuda_stand_in). Makes .venv and .venv-cuda first (0.5 GB the first time). Where the CUDA build cannot be had,
a line says so, and the status is 0.
Without arguments: tests/cuda, also the slow ones, and the jobs of tests/integration over NCCL, in half an hour.
  --torch RELEASE   another release of torch than that of .venv, in .venv-cuda-RELEASE
  --quick           the quick tests of tests/cuda, and a job over NCCL for each kind of failure: five minutes on two cores
With pytest arguments: these tests alone; with TITAN_FT_TEST_PROCESS_GROUP=nccl the jobs of tests/integration use NCCL.'
quick_jobs=( # beyond tests/cuda: deaths in an exchange, of a joiner, in a drain; a NaN; a full queue; the oracle
    'tests/integration/test_kill.py::test_kill_at_point[2-exchange_first]'
    'tests/integration/test_heal.py::test_kill_joiner_during_its_heal[1-replay]'
    'tests/integration/test_heal.py::test_a_newcomer_has_the_state_before_a_quorum[1-donor]'
    'tests/integration/test_catch_up.py::test_others_wait_for_a_joiner_whose_queue_is_full'
    'tests/integration/test_drain.py::test_sigterm_in_mid_heal'
    'tests/integration/test_nonfinite.py::test_nan_of_one_group_is_left_out[1-shrink]'
    'tests/integration/test_arithmetic.py::test_token_weighted_mean[1-True]'
    'tests/integration/test_arithmetic.py::test_a_pipeline_s_update_is_the_token_weighted_mean[1F1B-2-2-flags0]'
)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
if [[ ${1:-} == --torch ]]; then
    (($# >= 2)) || refuse "$1 needs a release"
    export STAND_IN_TORCH=$2
    shift 2
fi
quick=""
[[ ${1:-} != --quick ]] || { quick=1; shift; }
source tests/cuda_stand_in/setup.sh || exit $(($? == 3 ? 0 : 1)) # 3 = no wheel: a line has said so
if (($#)); then
    exec "$STAND_IN_PYTHON" -m pytest "$@"
fi
export TITAN_FT_TEST_PROCESS_GROUP=nccl
if [[ -n $quick ]]; then
    exec "$STAND_IN_PYTHON" -m pytest tests/cuda "${quick_jobs[@]}" -m 'not slow'
fi
exec "$STAND_IN_PYTHON" -m pytest tests/cuda tests/integration -m 'stand_in or not (slow or gpu or slurm)'
