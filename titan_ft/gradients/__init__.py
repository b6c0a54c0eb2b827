# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients between replica groups: buckets, their encodings, and the exchange."""
