# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The command line of `titan-ft`, one module for each command, with the command's name; `main.py`
runs them.

Each module has a function `run`, which gets an object of the command's class in `titan_ft.options`
and torchtitan's flags, and returns the exit status. A command imports its dependencies when it
runs.
"""
