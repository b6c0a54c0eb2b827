# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The report of a run: one page of HTML with its figures, and the same as numbers."""
