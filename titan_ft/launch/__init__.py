# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start and supervise the processes of a run: the lighthouse, the zygote, a supervisor for each group."""
