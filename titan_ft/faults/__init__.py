# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults that chaos injects. Each fault is a class.

The chaos runner, the agents in the workers, the history and the docs all read these classes:

- `fault` defines the base class.
- `outside` has the faults that are signals to processes.
- `inside` has the faults within a worker.
- `catalogue` finds a fault by its name.
- `schema` converts the tables of plans and orders to these classes.

The package loads no torch, and a run without chaos does not load the package. See docs/chaos.md.
"""
