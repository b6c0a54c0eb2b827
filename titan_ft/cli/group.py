# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft group`: run one replica group of a cluster's job on this node."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.cluster.group import run_group
from titan_ft.options import Group


def run(command: Group, worker_args: Sequence[str]) -> int:
    """Run the group until it ends."""
    return run_group(command, worker_args)
