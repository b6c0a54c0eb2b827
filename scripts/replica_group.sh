#!/usr/bin/env bash
# `titan-ft group`, by its older name: one replica group, once on each of its nodes. --help tells its options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/common.sh"
become titan_ft group "$@"
