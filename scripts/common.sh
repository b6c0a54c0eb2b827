# shellcheck shell=bash
# For the other scripts to source: options, whether there is a GPU, and a launch that ends with the script.

refuse() { # what is wrong
    echo "${0##*/}: $1" >&2
    exit 2
}

number() { # name, least value, value
    if [[ ! $3 =~ ^[0-9]{1,10}$ ]] || ((10#$3 < $2)); then
        refuse "$1 must be a whole number, at least $2, got '$3'"
    fi
}

help_first() { # the script's arguments, before it installs or starts anything
    local word
    for word in "$@"; do
        if [[ $word == --help || $word == -h ]]; then
            echo "$usage"
            exit 0
        fi
    done
}

become() { # module of this project, and its arguments
    local python=${TITAN_FT_PYTHON:-$root/.venv/bin/python}
    command -v "$python" >/dev/null || refuse "no $python; run scripts/setup_env.sh first, or set TITAN_FT_PYTHON"
    exec "$python" -m "$@"
}

# Set the variable of each option, and `rest` to what follows a --.
read_options() { # names of the options that have a value, names of those that have none, the script's arguments
    local valued=" ${1//[[:space:]]/ } " switches=" $2 " name
    shift 2
    while (($#)); do
        name=${1%%=*} name=${name#--}
        if [[ $1 == --*=* && $valued == *" $name "* ]]; then
            set -- "--$name" "${1#*=}" "${@:2}"
        fi
        case $1 in
        --help | -h) echo "$usage" && exit 0 ;;
        --) shift && break ;;
        *)
            if [[ $1 == "--$name" && $switches == *" $name "* ]]; then
                printf -v "${name//-/_}" yes && shift && continue
            fi
            [[ $1 == --* && $valued == *" $name "* ]] || refuse "no option '$1' (torchtitan flags go after --); see --help"
            ;;
        esac
        (($# >= 2)) || refuse "$1 needs a value"
        printf -v "${name//-/_}" %s "$2"
        shift 2
    done
    rest=("$@")
}

gpu_witness=""
has_gpu() { # asks torch where it is installed; else the driver, so that a machine without a GPU need not be set up
    local python=${TITAN_FT_PYTHON:-$root/.venv/bin/python}
    if command -v "$python" >/dev/null; then
        gpu_witness="the torch of $python"
        "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
    else
        gpu_witness="nvidia-smi -L"
        [[ -e /dev/kfd ]] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'
    fi
}

launcher=""
# shellcheck disable=SC2317  # called by the trap
stop() {
    # The launcher ends everything that it started when it is asked to end.
    [[ -z $launcher ]] || kill "$launcher" 2>/dev/null || true
    wait
}

launch() { # arguments of titan-ft launch
    local status=0
    trap stop EXIT
    trap 'exit 130' INT TERM
    "$TITAN_FT_PYTHON" -m titan_ft launch "$@" &
    launcher=$!
    wait "$launcher" || status=$?
    launcher=""
    return "$status"
}
