# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state on its way between replica groups: snapshots, the donor's server, the joiner's client,
the wire."""
