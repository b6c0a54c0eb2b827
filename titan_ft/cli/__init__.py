# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The command line of `titan-ft`: one module for each command, named after the command.

`main.py` parses the command line, and calls the function `run` of the command's module. `run` gets
an object of the command's class in `titan_ft.options` and torchtitan's flags, and returns the exit
status. Each module is imported only when its command runs.
"""
