# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start and keep the processes of a run: the lighthouse, the zygote, an agent for each group."""
