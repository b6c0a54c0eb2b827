# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Relative links from a page to the files of its run; they work after the run folder was moved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from titan_ft.run.paths import RunPaths


@dataclass(frozen=True)
class PageLinks:
    """The folders of a page and of its run.

    Attributes:
        run_dir: folder of the run; None if unknown, which leaves out every link.
        page_dir: folder of the page.
    """

    run_dir: Path | None
    page_dir: Path

    def to(self, path: Path | None) -> str:
        """Return the address of a file or a folder of the run; empty if it is not there."""
        if self.run_dir is None or path is None or not path.exists():
            return ""
        return quote(os.path.relpath(path.absolute(), self.page_dir.absolute()))

    def files(self) -> list[tuple[str, str]]:
        """Return the names and the addresses of the files that a reader of the page may want
        next.
        """
        if self.run_dir is None:
            return []
        paths = RunPaths(self.run_dir)
        named = {
            "config": paths.config,
            "launch.log": paths.launch_log,
            "logs": paths.launch_log.parent,
            "events": paths.events,
        }
        return [(name, self.to(path)) for name, path in named.items() if path.exists()]
