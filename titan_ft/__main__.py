# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Make `python -m titan_ft` the console script."""

from __future__ import annotations

import sys

from titan_ft.cli import main

if __name__ == "__main__":
    sys.exit(main())
