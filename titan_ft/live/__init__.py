# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Watch a live run: its status, and its views (terminal, titan-ft top, Prometheus)."""

from pathlib import Path

DASHBOARD = Path(__file__).parent / "grafana.json"
"""Of a run's figures in Prometheus, for Grafana."""
ALERTS = Path(__file__).parent / "alerts.yml"
"""Rules for Prometheus: what somebody should look at."""
