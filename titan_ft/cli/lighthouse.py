# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft lighthouse`: run a lighthouse in the foreground."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.launch.lighthouse import serve
from titan_ft.options import Lighthouse
from titan_ft.run.output import protect_output


def run(command: Lighthouse, worker_args: Sequence[str]) -> int:
    """Run the lighthouse until a signal ends it, or until another one takes its place."""
    protect_output()
    return serve(command)
