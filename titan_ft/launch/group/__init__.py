# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The workers of one group: its agent, the agent's forks, and the agents of the group's other
hosts.
"""
