# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the time of a run went: states of the groups, stalls, setbacks, effective training time."""
