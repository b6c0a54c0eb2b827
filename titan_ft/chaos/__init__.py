# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Inject faults into running jobs. A plan says when and which; the run's events record each fault.

Only `inside` imports torch. It is loaded in workers with `[fault_tolerance] chaos = true` and
nowhere else. See docs/chaos.md.
"""
