#!/usr/bin/env bash
# Make .venv-cuda (torch's CUDA build, the other packages from .venv) and build the stand-in. Quick when nothing changed.
# STAND_IN_TORCH: another release of torch than that of .venv. The environment and the build have it in their names.
# Source it: it sets STAND_IN_PYTHON, and what Python needs to load the stand-in in place of NVIDIA's libraries.
# Several shells may source it at once: one makes the environment, the others wait.
# Returns 3, with one line, where the wheel of torch cannot be had.

stand_in_make_venv() { # VENV TORCH_VERSION PACKAGES STAMP
    local venv=$1 torch_version=$2 packages=$3 stamp=$4 own
    [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$stamp" ]] || return 0 # another shell has made it meanwhile
    echo "Setting up $venv with the CUDA build of torch $torch_version (0.5 GB the first time)"
    rm -rf "$venv"
    "$TITAN_FT_PYTHON" -m venv --without-pip "$venv" || return 1
    # Without the user's settings of pip, which would prefer a build for CPU from a folder of wheels or a further index.
    # --no-deps: NVIDIA's own libraries (2.8 GB) must be absent, torch would prefer them to the stand-in.
    env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
        "$TITAN_FT_PYTHON" -m pip --python "$venv/bin/python" install -qq --no-deps "torch==$torch_version" || {
        rm -rf "$venv"
        echo "the CUDA build of torch $torch_version cannot be had from here: nothing is tested on the stand-in for CUDA" >&2
        return 3
    }
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    # After pip, which would take the other environment's torch for an installed one.
    echo "import site; site.addsitedir('$packages')" >"$own/packages.pth"
    echo "$stamp" >"$venv/stamp"
}

stand_in_setup() {
    local root here venv lib packages torch_version stamp
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || return 1
    root=$(cd "$here/../.." && pwd) || return 1
    source "$root/scripts/setup_env.sh" || return
    venv=$root/.venv-cuda${STAND_IN_TORCH:+-$STAND_IN_TORCH}
    lib=$here/lib${STAND_IN_TORCH:+/$STAND_IN_TORCH}

    torch_version=${STAND_IN_TORCH:-}
    [[ -n $torch_version ]] || torch_version=$("$TITAN_FT_PYTHON" -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])') || return
    packages=$("$TITAN_FT_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
    stamp="$torch_version $packages"
    if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$stamp" ]]; then
        mkdir -p "$lib"
        (
            flock 9
            stand_in_make_venv "$venv" "$torch_version" "$packages" "$stamp"
        ) 9>"$lib/venv.lock" || return
    fi
    bash "$here/build.sh" "$venv" "$lib" || return 1

    export STAND_IN_PYTHON=$venv/bin/python STAND_IN_LIB=$lib
    export LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PYTHONPATH=$root:$here/site${PYTHONPATH:+:$PYTHONPATH}
    # As titan_ft's launcher: torch 2.15 would take its other backend of NCCL inside a group (docs/gpu.md).
    export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
    export TORCH_DISABLE_NATIVE_JIT=1 # torch._native has kernels of Triton
}

stand_in_setup
