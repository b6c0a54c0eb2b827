#!/usr/bin/env bash
# Run tests with other releases: bash scripts/test_host.sh [--torchtitan RELEASE] [--torch RELEASE] [pytest arguments]
usage='usage: test_host.sh [--torchtitan RELEASE] [--torch RELEASE] [pytest arguments]
Runs tests with torchtitan 0.3.0 and torch 2.14.1, or with the releases that are named: the contract with torchtitan,
parity with stock FSDP and PP, a kill and a heal, a resume, the mean of the tokens, a method of rounds. Makes .venv
first, and beside it .venv-host, which has those releases (3 GB with the libraries of torch); for named releases the
folder is .venv-host-TORCHTITAN-TORCH. Where they cannot be had, a line says so, and the status is 0.
With pytest arguments: these tests alone. Tests that name parts of torchtitan 0.2.2 fail with 0.3.0.'
torchtitan=0.3.0 torch=2.14.1
runs=(
    tests/host/test_titan.py tests/host/test_titan_0_3.py tests/host/test_titan_main.py
    'tests/integration/test_kill.py::test_kill_at_point[2-vote_before]'
    'tests/integration/test_parallelism.py::test_parity[fsdp]'
    'tests/integration/test_parallelism.py::test_parity[pp]'
    'tests/integration/test_parallelism.py::test_heal[tp]'
    'tests/integration/test_parallelism.py::test_resume[fsdp]'
    'tests/integration/test_arithmetic.py::test_token_weighted_mean[1-True]'
    'tests/integration/test_semi_sync.py::test_kill_in_the_exchange[False-exchange_first-1-flags0]'
)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
named=""
while [[ ${1:-} == --torchtitan || ${1:-} == --torch ]]; do
    (($# >= 2)) || refuse "$1 needs a release"
    named=yes
    printf -v "${1#--}" %s "$2"
    shift 2
done
others=()
[[ $torchtitan != 0.3.* ]] || others=(spmd_types==0.2.3 torch_checkpointing==0.1.1) # what it needs besides
source scripts/setup_env.sh

venv=$PWD/.venv-host${named:+-$torchtitan-$torch}
install() { # pip's arguments
    "$TITAN_FT_PYTHON" -m pip --python "$venv/bin/python" install -qq "$@"
}
packages=$("$TITAN_FT_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp="$torchtitan $torch ${others[*]-} $packages"
if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$stamp" ]]; then
    echo "Setting up $venv with torchtitan $torchtitan and torch $torch (3 GB)"
    rm -rf "$venv"
    "$TITAN_FT_PYTHON" -m venv --without-pip "$venv"
    grep -vE '^(torch|torchtitan|triton)==' constraints.txt >"$venv/constraints.txt"
    # --no-deps: the rest is in .venv.
    if ! install --no-deps "torchtitan==$torchtitan" ${others[@]+"${others[@]}"} || ! install -c "$venv/constraints.txt" "torch==$torch"; then
        rm -rf "$venv"
        echo "torchtitan $torchtitan or torch $torch cannot be had from here: it is not tested" >&2
        exit 0
    fi
    # After pip, which would take the other environment's packages for installed ones.
    echo "import site; site.addsitedir('$packages')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
    echo "$stamp" >"$venv/stamp"
fi
export TITAN_FT_PYTHON=$venv/bin/python PYTHONPATH=$PWD
(($#)) || set -- "${runs[@]}" -m "" --numprocesses 2
exec "$TITAN_FT_PYTHON" -m pytest "$@"
