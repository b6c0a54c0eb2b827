#!/usr/bin/env bash
# Make .venv-cuda (torch's CUDA build, the other packages from .venv) and build the stand-in. Quick when nothing changed.
# Source it: it sets STAND_IN_PYTHON, and what Python needs to load the stand-in in place of NVIDIA's libraries.
# Returns 3, with one line, where the wheel of torch cannot be had.

stand_in_setup() {
    local root here venv packages own torch_version
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || return 1
    root=$(cd "$here/../.." && pwd) || return 1
    source "$root/scripts/setup_env.sh" || return
    venv=$root/.venv-cuda

    torch_version=$("$TITAN_FT_PYTHON" -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])') || return
    packages=$("$TITAN_FT_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
    if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$torch_version $packages" ]]; then
        echo "Setting up $venv with the CUDA build of torch $torch_version (0.5 GB the first time)"
        rm -rf "$venv"
        "$TITAN_FT_PYTHON" -m venv --without-pip "$venv" || return 1
        # Without the user's settings of pip: a folder of wheels may have a build for CPU, which pip would prefer.
        # --no-deps: NVIDIA's own libraries (2.8 GB) must be absent, torch would prefer them to the stand-in.
        env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null "$TITAN_FT_PYTHON" -m pip --python "$venv/bin/python" install -qq --no-deps \
            "torch==$torch_version" || {
            rm -rf "$venv"
            echo "the CUDA build of torch $torch_version cannot be had from here: nothing is tested on the stand-in for CUDA" >&2
            return 3
        }
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
        echo "import site; site.addsitedir('$packages')" >"$own/packages.pth" # only now: pip would take its torch for this one
        echo "$torch_version $packages" >"$venv/stamp"
    fi
    bash "$here/build.sh" "$venv" "$here/lib" || return 1

    export STAND_IN_PYTHON=$venv/bin/python
    export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PYTHONPATH=$root:$here/site${PYTHONPATH:+:$PYTHONPATH}
    export TORCH_DISABLE_NATIVE_JIT=1 # torch._native has kernels of Triton
}

stand_in_setup
