# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Record what happened in a run, and draw conclusions from the record. Pure: no torch anywhere below."""
