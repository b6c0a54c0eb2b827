# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read what happened in a run into one record, and draw conclusions from it. Pure: no torch anywhere below."""
