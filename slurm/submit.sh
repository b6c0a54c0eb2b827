#!/usr/bin/env bash
# `titan-ft slurm submit`, by its older name: a lighthouse, and an array with one element for each replica group.
# --help tells its options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/common.sh"
become titan_ft slurm submit "$@"
