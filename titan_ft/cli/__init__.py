# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The command line of `titan-ft`, one module a command, called like it; `main.py` runs them.

Each has a function `run`, which gets an object of the command's class in `titan_ft.options` and torchtitan's flags,
and returns the exit status. What a command needs is imported when it runs.
"""
