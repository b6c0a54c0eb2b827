# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Watch a run that goes on: its status, and what shows it (terminal, titan-ft top, Prometheus)."""
