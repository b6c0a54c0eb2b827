# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Break running jobs on purpose: a schedule says when, a fault what, the run's history records it.

No torch but in `inside`, which is loaded in workers only, and only with `[fault_tolerance] chaos = true`.
"""
