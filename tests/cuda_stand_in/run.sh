#!/usr/bin/env bash
# run.sh PYTHON_ARGUMENTS...: Python with torch's CUDA build, over the stand-in: run.sh -m titan_ft launch ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$STAND_IN_PYTHON" "$@"
