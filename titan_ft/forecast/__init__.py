# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Forecast what failures will cost a job, and which shape of groups to take: `titan-ft plan`."""
