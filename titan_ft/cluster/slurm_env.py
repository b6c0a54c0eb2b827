# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read Slurm's description of a job from its environment."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

_RANK_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Variables with the number of ranks on a node. The first that has a number counts."""
_SCONTROL_SECONDS = 30.0
"""Time limit of scontrol."""


def read_number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable of Slurm; None without the variable, or without a number."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


def read_ranks_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of the job on a node, or else of tasks; None outside Slurm.

    Slurm writes such a number as "8", "h100:8" or "4(x2)".
    """
    for name in _RANK_VARIABLES:
        found = re.match(r"(?:[^:]*:)*(\d+)", environ.get(name, ""))
        if found is not None:
            return int(found[1])
    return None


def choose_rendezvous(environ: Mapping[str, str]) -> str:
    """Return HOST:PORT on the job's first node; empty outside Slurm."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return ""
    # Two groups may have the same first host. Their jobs have different ids, and so other ports.
    job_id = read_number(environ, "SLURM_JOB_ID") or 0
    port = 20000 + job_id % 10000
    return f"{find_first_host(nodes)}:{port}"


def find_first_host(nodes: str) -> str:
    """Return the first host of a list such as node[03-07,09],other1.

    scontrol knows all forms of such a list. In a container it may be missing, or fail for lack of
    Slurm's configuration.
    """
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return _parse_first_host(nodes)
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.split()[0]
    return _parse_first_host(nodes)


def _parse_first_host(nodes: str) -> str:
    # A prefix, the first number in the brackets, and a suffix, as in node[03-07]-gpu.
    bracketed = re.match(r"([^],\[]*)\[(\d+)[^\]]*\]([^,]*)", nodes)
    if bracketed is None:
        return nodes.partition(",")[0]
    prefix, first_number, suffix = bracketed.groups()
    return f"{prefix}{first_number}{suffix}"
