# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/mutate.py, on a package of two functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutate

ROOT = Path(__file__).parents[2]

CODE = "def add(a, b):\n    return a + b\n\n\ndef halve(a):\n    return a / 2\n"
TESTS = """
from toy.sums import add, halve

def test_add():
    assert add(2, 1) == 3

def test_halve():
    assert halve(0) == 0
"""
ABORT = """
import os
failed = []

def pytest_runtest_logreport(report):
    failed.append(report.failed)

def pytest_unconfigure():
    if any(failed):
        os.abort()
"""
EXPLORE = '"$TITAN_FT_PYTHON" -c "from toy.sums import halve; assert halve(4) == 2"\n'
NOTICED = ("a difference", "a + b", "a - b", "tests/test_sums.py")
MISSED = ("doubles", "a / 2", "a * 2", "tests/test_sums.py::test_halve")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a test that notices, and one that does not."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each start of pytest takes a third of the time
    for folder in ("toy", "tests", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    (tmp_path / "toy" / "sums.py").write_text(CODE)
    (tmp_path / "tests" / "test_sums.py").write_text(TESTS)
    return tmp_path


def write_list(root: Path, *entries: tuple[str, str, str, str]) -> None:
    text = ""
    for name, old, new, tests in entries:
        text += f"[[mutation]]\nname = {name!r}\nfile = 'toy/sums.py'\ntests = {tests!r}\n"
        text += f"old = '''{old}'''\nnew = '''{new}'''\n"
    (root / mutate.LIST).write_text(text)


def run(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = mutate.main(["--root", str(root), *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_is_noticed_and_what_is_not(root: Path, capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    """Each has its line, the sum has one, and the repository itself is never touched."""
    write_list(root, NOTICED, MISSED)
    status, text = run(root, capsys, "--jobs", jobs)
    assert status == 1
    assert "noticed      toy/sums.py: a difference: FAILED tests/test_sums.py::test_add" in text
    assert "NOT noticed  toy/sums.py: doubles (" in text
    assert text.endswith("1 of 2 noticed, 1 NOT noticed\n")
    assert (root / "toy" / "sums.py").read_text() == CODE


def test_all_noticed_is_success(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0."""
    write_list(root, NOTICED, MISSED)
    assert run(root, capsys, "--only", "differ")[0] == 0


def test_the_simulation_has_the_last_word(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --explore, where there is one; also for an entry without tests."""
    write_list(root, MISSED, ("squares", "a / 2", "a**2 / 2", ""))
    status, text = run(root, capsys, "--explore")
    assert status == 2
    assert "--explore needs scripts/explore.sh" in text
    (root / "scripts" / "explore.sh").write_text(EXPLORE)
    status, text = run(root, capsys, "--explore")
    assert status == 0, text
    assert text.count("by the simulation: AssertionError") == 2
    assert run(root, capsys, "--only", "squares")[0] == 1


@pytest.mark.parametrize("old", ["a + c", "a"])
def test_a_text_that_is_not_there_once_is_stale(root: Path, capsys: pytest.CaptureFixture[str], old: str) -> None:
    """It is told, and counts as a failure: else a list would rot."""
    write_list(root, NOTICED, ("rotten", old, "b", "tests/test_sums.py"))
    status, text = run(root, capsys)
    assert status == 1
    assert "stale        toy/sums.py: rotten" in text
    assert text.endswith("1 of 2 noticed, 1 stale\n")
    status, text = run(root, capsys, "--list")
    assert text.splitlines() == ["toy/sums.py:2: a difference", "toy/sums.py:stale: rotten"]
    assert status == 0


def test_an_end_by_a_signal_takes_no_verdict_back(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads of a failed test may abort the process when it ends."""
    write_list(root, NOTICED)
    (root / "tests" / "conftest.py").write_text(ABORT)
    status, text = run(root, capsys)
    assert status == 0, text
    assert "noticed      toy/sums.py: a difference: FAILED tests/test_sums.py::test_add" in text


@pytest.mark.parametrize("new", ["a +", "a + c\nimport nothing_of_that_name"])
def test_what_does_not_even_load_is_no_mutation(root: Path, capsys: pytest.CaptureFixture[str], new: str) -> None:
    """Any test would notice that."""
    write_list(root, ("breaks", "a + b", new, "tests/test_sums.py"))
    status, text = run(root, capsys)
    assert status == 1
    assert "broken       toy/sums.py: breaks: pytest ended with 2" in text


def test_tests_that_do_not_end_have_noticed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are ended, and the next mutation is tried."""
    write_list(root, ("hangs", "return a + b", "while True:\n        pass", "tests/test_sums.py"), NOTICED)
    status, text = run(root, capsys, "--timeout", "5")
    assert status == 0
    assert "hangs: the tests do not end (5 s)" in text


def test_tests_that_fail_by_themselves_notice_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nothing is tried."""
    write_list(root, NOTICED)
    (root / "tests" / "test_sums.py").write_text(TESTS.replace("== 3", "== 4"))
    status, text = run(root, capsys)
    assert status == 2
    assert text.startswith("mutate.py: the tests must pass without any mutation, got: FAILED")


def test_a_sample_is_that_of_its_seed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same each time, another one for another seed, and never more than there are."""
    write_list(root, *[(f"number {number}", "a + b", f"a + {number}", "") for number in range(9)])
    first, again, other = (run(root, capsys, "--list", "--sample", "4", "--seed", seed)[1] for seed in "003")
    assert first == again != other
    assert len({*first.splitlines()}) == 4
    assert len(run(root, capsys, "--list", "--sample", "40")[1].splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "nothing"], "--only must match a mutation, got 'nothing'; --list names them"),
        (["--sample", "0"], "--sample must be >= 1, got 0; leave it out for all"),
        (["--jobs", "0"], "--jobs must be >= 1, got 0; 1 tries one after the other"),
    ],
)
def test_bad_usage(root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    """One line."""
    write_list(root, NOTICED)
    assert run(root, capsys, *arguments) == (2, f"mutate.py: {line}\n")


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([("same", "a", "a", "")], "'same' must change something, got old equal to new"),
        ([NOTICED, NOTICED], "each name must be unique, got 'a difference' twice"),
        ([], "must be a list of [[mutation]] with name, file, old, new, tests: 'mutation'"),
    ],
)
def test_a_bad_list(
    root: Path, capsys: pytest.CaptureFixture[str], entries: list[tuple[str, str, str, str]], part: str
) -> None:
    """One line that names it."""
    write_list(root, *entries)
    status, text = run(root, capsys)
    assert status == 2
    assert part in text


def test_no_entry_of_ours_is_stale() -> None:
    """Each is in the code as it is, exactly once, and its tests are there."""
    for mutation in mutate.read_list(ROOT / mutate.LIST):
        assert mutation.place(ROOT), f"{mutation.file}: {mutation.name}"
        for test in mutation.tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), test
