# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft dashboard`: print the dashboard for Grafana, or the alerts for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.live import ALERTS, DASHBOARD
from titan_ft.options import Dashboard


def run(command: Dashboard, worker_args: Sequence[str]) -> int:
    """Print the file."""
    file = ALERTS if command.alerts else DASHBOARD
    print(file.read_text(encoding="utf-8"), end="")
    return 0
