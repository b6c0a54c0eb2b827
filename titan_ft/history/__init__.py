# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a run's events into one record, and draw conclusions from it. Pure: nothing below imports
torch.
"""
