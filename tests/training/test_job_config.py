# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's config, which the process that workers are forked from has read."""

from __future__ import annotations

import os
from pathlib import Path

from titan_ft.training.job_config import read_config

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_debug.toml"


def test_a_config_is_read_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """A fork finds it read; a worker that is started after the file was changed gets what it says then."""
    file = tmp_path / "run.toml"
    text = CONFIG.read_text()
    file.write_text(text.replace("trace_buf_size = 0", "trace_buf_size = 1"))
    flag = f"--job.config_file={file}"
    first = read_config(flag)
    assert first.comm.trace_buf_size == 1
    assert read_config(flag) is first
    file.write_text(text.replace("trace_buf_size = 0", "trace_buf_size = 2"))
    changed = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(changed, changed))
    assert read_config(flag).comm.trace_buf_size == 2
