#!/usr/bin/env bash
# Two groups train the Llama 3 debug model on real text; one is killed, comes back, heals from its peer, and finishes.
# Needs only Python (3.11 to 3.13) and pip. Arguments are torchtitan flags: bash scripts/quickstart.sh --training.steps=60
usage='usage: quickstart.sh [torchtitan flags, such as --training.steps=60]
Two groups train the Llama 3 debug model on real text. One is killed, comes back, heals from its peer, and finishes.
Makes .venv first, which takes minutes; with TITAN_FT_PYTHON set nothing is installed.'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
help_first "$@"
source scripts/setup_env.sh
exec bash scripts/kill_and_rejoin.sh "outputs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
