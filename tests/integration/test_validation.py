# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Validation on all of a dataset, with unequal shares of the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.job import Job
from harness.trajectory import check, check_finished

VALIDATED = re.compile(r"validate step: *(\d+) .*?loss: *([\d.]+)")
END = re.compile(
    r"the loss is of the first (\d+) batches of each rank, where the data of (.*) ends"
)
CHAPTERS = (9, 3, 14, 2, 5)  # paragraphs; two ranks get three chapters and two
FLAGS = [
    "--validation.enable",
    "--validation.freq=2",
    "--validation.dataset=austen_validation",
    "--validation.local_batch_size=2",
    "--validation.seq_len=32",
    "--metrics.disable_color_printing",
]


def write_text(path: Path, chapters: tuple[int, ...] = CHAPTERS) -> Path:
    """Write a book whose chapters have so many paragraphs."""
    parts = [
        "\n\n".join(
            [f"Chapter {number}", *(f"In line {line} she said no word." for line in range(lines))]
        )
        for number, lines in enumerate(chapters, start=1)
    ]
    path.write_text("\n\n".join(parts))
    return path


def validated(job: Job, replica: int, rank: int) -> list[tuple[int, float]]:
    """Return step and loss of each validation that a rank has logged."""
    return [(int(step), float(loss)) for step, loss in VALIDATED.findall(job.output(replica, rank))]


def test_the_data_ends_for_all_ranks_at_once(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """All ranks end a validation at the same batch. Else Gloo aborts the rank that is first at the
    end of its share.

    The loss of each validation is that of the batches which all ranks have.
    """
    flags = [*FLAGS, f"--validation.dataset_path={write_text(tmp_path / 'book.txt')}"]
    job = make_job(
        groups=2, ranks=2, steps=4, flags=[*flags, "--validation.steps=-1"], max_restarts=0
    )
    job.run()
    check(job, survivors=[0, 1])
    ends = [END.findall(job.output(replica, rank)) for replica in (0, 1) for rank in (0, 1)]
    assert ends == [ends[0]] * 4
    ((batches, who),) = ends[0]
    assert who == "rank 1"
    found = [validated(job, replica, rank) for replica in (0, 1) for rank in (0, 1)]
    # torchtitan logs on rank 0 alone.
    assert [step for step, _ in found[0]] == [1, 2, 4]
    assert found[2] == found[0]

    counted = make_job(groups=2, ranks=2, steps=4, flags=[*flags, f"--validation.steps={batches}"])
    counted.run()
    check_finished(counted, counted.events(), 4)
    assert validated(counted, 0, 0)[0] == found[0][0]


def test_a_rank_without_a_batch(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A rank without a batch ends with one line and status 2, and is not restarted, instead of an
    exception or a SIGABRT.
    """
    book = write_text(tmp_path / "book.txt", (30, 1))
    flags = [*FLAGS, f"--validation.dataset_path={book}", "--validation.steps=-1"]
    job = make_job(groups=1, ranks=2, steps=4, flags=flags)
    job.run()
    (codes,) = job.groups[0].ended
    assert 2 in codes
    # The other may get SIGTERM first.
    for rank, code in enumerate(codes):
        if code != 2:
            continue
        (line,) = [
            line for line in job.output(0, rank).splitlines() if line.startswith("titan_ft: ")
        ]
        assert line.startswith(
            "titan_ft: validation.dataset must have a sequence of validation.seq_len tokens"
        )
        assert "got none for rank 1 of a group; " in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]),
        (4, ["--parallelism.tensor_parallel_degree=2"]),
        (2, ["--validation.dataloader.num_workers=1"]),
        (
            2,
            ["--validation.dataloader.num_workers=1", "--validation.dataloader.persistent_workers"],
        ),
        (2, ["--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=2"]),
        (2, ["--fault_tolerance.semi_sync_method=local_sgd", "--fault_tolerance.sync_steps=1"]),
    ],
    ids=["pipeline", "tensor", "workers", "workers that stay", "diloco", "local_sgd"],
)
def test_whatever_is_inside_a_group(
    make_job: Callable[..., Job], tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    """Two groups validate three times, with one result."""
    book = write_text(tmp_path / "book.txt")
    given = [*FLAGS, f"--validation.dataset_path={book}", "--validation.steps=-1", *flags]
    job = make_job(groups=2, ranks=ranks, steps=6, flags=given, max_restarts=0)
    job.run()
    check_finished(job, job.events(), 3 if "sync_steps=2" in flags[-1] else 6)
    found = validated(job, 0, 0)
    assert len(found) >= 3
    assert validated(job, 1, 0) == found
    if "pipeline" in flags[0]:
        assert validated(job, 0, ranks - 1) == found
