#!/usr/bin/env bash
# The lighthouse, with this project's defaults, for a cluster: one for the whole job, on a host that all groups reach.
# Arguments are those of 'titan-ft lighthouse' (see --help). Give its address to replica_group.sh as --lighthouse.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TITAN_FT_PYTHON:-$root/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "lighthouse.sh: no $python; run scripts/setup_env.sh first, or set TITAN_FT_PYTHON" >&2
    exit 2
fi
exec "$python" -m titan_ft lighthouse "$@"
