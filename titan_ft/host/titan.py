# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The installed torchtitan, as the rest of the package uses it: `titan_0_2` or `titan_0_3`.

Both modules offer the same names, in `__all__`, in the terms of 0.2: a job is a `JobConfig` with
the tables of its TOML, a model is a `TrainSpec`. `titan_0_3` translates. Tests: test_contract.py
and host/test_titan.py.

Call `titan_ft.host.cpu.prepare` first: torchtitan reads the device during its import. The import
takes two seconds, so modules that also run without torchtitan import this module inside their
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_ft.host.release import series

if TYPE_CHECKING:
    from titan_ft.host.titan_0_2 import *  # noqa: F403  # the names of `__all__`
elif series() == "0.2":
    from titan_ft.host.titan_0_2 import *  # noqa: F403
else:
    from titan_ft.host.titan_0_3 import *  # noqa: F403
