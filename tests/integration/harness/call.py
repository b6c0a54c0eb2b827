# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Call one function, "module:function", as a program. The further arguments are the function's
command line.
"""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # a test that ran out of time asks where its workers hang
    module, _, function = sys.argv[1].partition(":")
    sys.argv = [module, *sys.argv[2:]]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
