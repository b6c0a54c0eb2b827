# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start and supervise replica groups: lighthouse, supervisors, live status, and the paths of a run."""
