# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: membership, exchange, heal and catch-up between replica groups."""
