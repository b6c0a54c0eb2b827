# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft kubernetes`: print the objects that run a job on Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.cluster.kubernetes import render
from titan_ft.options import Kubernetes


def run(command: Kubernetes, worker_args: Sequence[str]) -> int:
    """Print the objects as YAML."""
    print(render(command, worker_args))
    return 0
