# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults that chaos injects. Each fault is one class.

Everything that injects, shows or judges faults reads these classes:

- `fault` defines their base class.
- `outside` has the faults that are signals to processes.
- `inside` has the faults within a worker.
- `catalogue` finds a fault by its name.

The package loads no torch, and a run without chaos does not load the package. See docs/chaos.md.
"""
