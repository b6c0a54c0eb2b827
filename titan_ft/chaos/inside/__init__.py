# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Faults that a worker inflicts on itself on orders; only with `[fault_tolerance] chaos = true`."""
