# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the workers of one group: its agent, the processes that the agent forks, the agents of its other hosts."""
