#!/usr/bin/env bash
# Set up and run the tests: bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
exec "$TITAN_FT_PYTHON" -m pytest "$@"
