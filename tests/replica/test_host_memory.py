# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What is left of a host's memory: the kernel's word, and that of the cgroups, of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.replica.host_memory import free_bytes, most_updates

GB = 2**30


def write(root: Path, **files: str) -> None:
    """Write files below `root`; in their names __ is a slash, and _DOT_ a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(free: int) -> str:
    return f"MemTotal:  {2 * free // 1024} kB\nMemFree: 1 kB\nMemAvailable:  {free // 1024} kB\n"


def test_this_machine_tells() -> None:
    """On Linux it is a part of what the machine has."""
    free = free_bytes()
    assert free is not None
    assert 0 < free < 2**50


def test_without_cgroups_it_is_what_the_host_has(tmp_path: Path) -> None:
    """With caches that the kernel would drop; without any word nobody knows."""
    assert free_bytes(tmp_path) is None
    write(tmp_path, proc__meminfo=meminfo(5 * GB))
    assert free_bytes(tmp_path) == 5 * GB
    write(tmp_path, proc__self__cgroup="0::/\n")
    assert free_bytes(tmp_path) == 5 * GB


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [("max", "max", 50), (str(10 * GB), "max", 7), (str(10 * GB), str(12 * GB), 2), (str(GB), "max", 0)],
)
def test_a_cgroup_and_those_above_it_bound_it(tmp_path: Path, own: str, above: str, expected: int) -> None:
    """Each has its limit and what is used of that; files that are cached and not used any more do not count."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="0::/slice/job\n",
        sys__fs__cgroup__slice__job__memory_DOT_max=f"{own}\n",
        sys__fs__cgroup__slice__job__memory_DOT_current=f"{4 * GB}\n",
        sys__fs__cgroup__slice__job__memory_DOT_stat=f"anon {3 * GB}\ninactive_file {GB}\n",
        sys__fs__cgroup__slice__memory_DOT_max=f"{above}\n",
        sys__fs__cgroup__slice__memory_DOT_current=f"{10 * GB}\n",
    )
    assert free_bytes(tmp_path) == expected * GB


def test_a_container_sees_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    """Its path may be that of the host, which is not there."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="0::/kubepods/pod7\n",
        sys__fs__cgroup__memory_DOT_max=f"{8 * GB}\n",
        sys__fs__cgroup__memory_DOT_current=f"{2 * GB}\n",
    )
    assert free_bytes(tmp_path) == 6 * GB


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    """Memory has a tree of its own; without a limit it tells an enormous one."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="5:cpu,cpuacct:/job\n4:memory:/job\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=f"{2**63 - 4096}\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=f"{30 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes=f"{16 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_usage_in_bytes=f"{12 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_stat=f"inactive_file 1\ntotal_inactive_file {3 * GB}\n",
    )
    assert free_bytes(tmp_path) == 7 * GB


def test_a_full_cgroup_leaves_nothing_and_one_update_is_queued(tmp_path: Path) -> None:
    """Without any queue no joiner would ever be one of the others."""
    assert most_updates(FaultTolerance(), 0, 8, 4 * GB) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, 12), ({"catch_up_max_gb": 20.0}, 5), ({"catch_up_max_steps": 7}, 7), ({"catch_up_max_steps": 100}, 12)],
)
def test_half_of_it_is_shared_out_among_the_ranks(config: dict[str, float], expected: int) -> None:
    """Of 800 GB 8 ranks may queue 50 GB each: 12 updates of 4 GB. A bound in steps is one more."""
    settings = FaultTolerance()
    for name, value in config.items():
        setattr(settings, name, value)
    assert most_updates(settings, 800 * GB, 8, 4 * GB) == expected
