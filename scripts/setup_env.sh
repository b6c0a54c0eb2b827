#!/usr/bin/env bash
# Make .venv with everything installed, and set TITAN_FT_PYTHON to its interpreter. Source it, or run it by itself.
# Quick when nothing has changed. Python 3.11, 3.12 or 3.13 is looked for as $PYTHON, python3.11, python3.12, python3.13,
# python3. An existing .venv keeps its Python; remove it to change that.
# An environment of your own (a cluster's module, a container): set TITAN_FT_PYTHON, and nothing is installed.

titan_ft_setup() {
    local root python candidate stamp supported
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    if [[ -n ${TITAN_FT_PYTHON:-} ]]; then
        command -v "$TITAN_FT_PYTHON" >/dev/null || {
            echo "setup_env.sh: TITAN_FT_PYTHON must be a Python interpreter, got '$TITAN_FT_PYTHON'" >&2
            return 2
        }
        return 0
    fi

    supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c "$supported" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [[ -z ${python:-} ]]; then
        echo "setup_env.sh: Python 3.11, 3.12 or 3.13 is needed, and none of ${PYTHON:+$PYTHON, }python3.11, python3.12," \
            "python3.13, python3 is one; install one, or set PYTHON to its path" >&2
        return 2
    fi

    stamp=$(cat "$root/pyproject.toml" "$root/constraints.txt" | "$python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read() + sys.argv[1].encode()).hexdigest())' "$root")
    if [[ ! -f $root/.venv/titan_ft_stamp || $(<"$root/.venv/titan_ft_stamp") != "$stamp" ]]; then
        echo "Setting up $root/.venv (a few minutes the first time)"
        if [[ ! -x $root/.venv/bin/python ]]; then
            "$python" -m venv "$root/.venv" || {
                rm -rf "$root/.venv"
                echo "setup_env.sh: '$python -m venv' failed; on Debian and Ubuntu it needs the" \
                    "package ${python##*/}-venv" >&2
                return 1
            }
        fi
        (cd "$root" && .venv/bin/python -m pip install -qq --constraint constraints.txt --editable '.[dev]') || {
            echo "setup_env.sh: pip could not install the packages of constraints.txt (see above)" >&2
            return 1
        }
        echo "$stamp" >"$root/.venv/titan_ft_stamp"
    fi
    export TITAN_FT_PYTHON=$root/.venv/bin/python
}

titan_ft_setup
