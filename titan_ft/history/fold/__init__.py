# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The one fold of a run's events into its state; every view of a run reads it."""
