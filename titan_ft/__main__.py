# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The console script `titan-ft`, which is also `python -m titan_ft`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run one command and return its exit status; see `cli.main`."""
    try:
        # Imported here: the imports take most of a second, and a Ctrl-C during them printed a
        # traceback.
        from titan_ft.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
