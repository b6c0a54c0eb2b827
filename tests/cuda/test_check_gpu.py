# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/check_gpu.sh as a whole, on one GPU of the stand-in and on four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 1800


def check_gpu(num_gpus: int, work_dir: Path) -> list[dict[str, Any]]:
    """Run the script on GPUs of the stand-in; return the rows of its table, none of which is a
    problem.
    """
    recipe = ROOT / "configs" / "llama3_debug.toml"  # a CPU cannot compute the 1B model in time
    command = ["bash", str(ROOT / "scripts" / "check_gpu.sh"), "--small", "--recipe", str(recipe)]
    # As slow as on a host where 256 MiB took 2.5 s: a thread that stands still meanwhile shows.
    pinning = {"FAKE_PIN_MS_PER_MB": "10"}
    env = {
        **os.environ,
        **pinning,
        "TITAN_FT_PYTHON": sys.executable,
        "FAKE_CUDA_DEVICES": str(num_gpus),
    }
    ended = subprocess.run(
        [*command, "--work-dir", str(work_dir)],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
    assert ended.stdout.splitlines()[-1] == "every promise holds"
    rows: list[dict[str, Any]] = json.loads((work_dir / "figures.json").read_text())["rows"]
    return rows


@pytest.mark.slow
def test_one_gpu(tmp_path: Path) -> None:
    """Rows that need more GPUs say so."""
    rows = check_gpu(1, tmp_path / "work")
    needs = Counter(row["verdict"] for row in rows if row["verdict"].startswith("needs"))
    assert needs == {"needs 2 GPUs": 7, "needs 4 GPUs": 1}
    holds = {row["what"] for row in rows if row["verdict"] == "holds"}
    assert len(holds) == 10
    assert "NCCL: every collective of the exchange on one communicator" in holds


@pytest.mark.slow
def test_four_gpus(tmp_path: Path) -> None:
    """All rows are measured: the groups over Gloo and over NCCL, with FSDP in each group."""
    rows = check_gpu(4, tmp_path / "work")
    assert not [row for row in rows if row["verdict"].startswith("needs")]
    holds = {row["what"] for row in rows if row["verdict"] == "holds"}
    assert len(holds) == 16
    assert "nccl: gradients in bfloat16, as over Gloo" in holds
