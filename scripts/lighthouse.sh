#!/usr/bin/env bash
# `titan-ft lighthouse`, by its older name. --help tells its options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/common.sh"
become titan_ft lighthouse "$@"
