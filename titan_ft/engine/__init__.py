# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fault-tolerant step: rounds, decisions and acts, the heal, the donor and the feed."""
