# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One checker per promise: each reads a run's record and judges it, independent of the others."""
