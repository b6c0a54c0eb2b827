# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults that chaos injects: one class each, read by everything that injects, shows or judges them.

`fault` has their base, `outside` the signals, `inside` the faults within a worker, `catalogue` finds them by name.
The package loads no torch, and a run that nobody breaks does not load the package.
"""
