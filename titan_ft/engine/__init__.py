# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fault-tolerant step: exchange, vote, decision and act, and the heal, the donor and the feed beside it."""
