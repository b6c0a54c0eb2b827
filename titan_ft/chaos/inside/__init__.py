# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What breaks a worker from the inside when `titan_ft.chaos` orders it; only with `[fault_tolerance] chaos = true`."""
