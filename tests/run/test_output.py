# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Printing into a file on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ft.run.output import choose_native_log

PROTECT = "from titan_ft.run.output import protect_output; protect_output(); protect_output()\n"
LIMIT = "import resource, sys\ndef limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"


def run(code: str, stdout: Path, stderr: Path | None = None) -> tuple[int, str]:
    """Run a program that prints into files; return its exit status and the text of the other
    stream.
    """
    with stdout.open("ab") as out:
        errors = subprocess.PIPE if stderr is None else stderr.open("ab")
        ran = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=errors, timeout=60, check=False
        )
    return ran.returncode, (ran.stderr or b"").decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_ends_no_process_that_prints() -> None:
    """Neither print, nor a flush, nor logging, nor the end of the process fails; without it all of
    them do.
    """
    code = (
        "import logging, sys\nprint('a', flush=True); print('b', file=sys.stderr)\n"
        "logging.error('c'); sys.stdout.flush()"
    )
    full = Path("/dev/full")
    assert run(PROTECT + code, full, full)[0] == 0
    assert run(code, full, full)[0] != 0
    assert run(PROTECT + code, full) == (0, "b\nERROR:root:c\n")


def test_lines_are_there_when_there_is_room_again(tmp_path: Path) -> None:
    """In order, and whole: also where both streams go to one file, as those of a worker do."""
    code = (
        "limit(20)\nprint('out', 1); print('err', 1, file=sys.stderr); print('out', 2); print('a line too many')\n"
        "print('another one', file=sys.stderr)\nlimit(-1)\nprint('err', 2, file=sys.stderr); print('out', 3)"
    )
    path = tmp_path / "log"
    assert run(LIMIT + PROTECT + code, path, path)[0] == 0
    expected = ["out 1", "err 1", "out 2", "a line too many", "another one", "err 2", "out 3"]
    assert path.read_text().splitlines() == expected
    assert (
        run(LIMIT + PROTECT + code.replace("20", "4"), tmp_path / "out", tmp_path / "err")[0] == 0
    )
    assert (tmp_path / "out").read_text().splitlines() == [
        "out 1",
        "out 2",
        "a line too many",
        "out 3",
    ]
    assert (tmp_path / "err").read_text().splitlines() == ["err 1", "another one", "err 2"]


def test_fork_with_other_outputs(tmp_path: Path) -> None:
    """A process with one file as both outputs may fork another one whose outputs are two."""
    code = (
        "import os\nif not os.fork():\n"
        "    os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 2)\n"
        "    protect_output(); print('child out'); print('child err', file=sys.stderr); os._exit(0)\n"
        "os.wait(); print('parent')"
    )
    path, other = tmp_path / "log", tmp_path / "other"
    with path.open("ab") as out:
        command = [sys.executable, "-c", "import sys\n" + PROTECT + code, str(other)]
        assert (
            subprocess.run(command, stdout=out, stderr=out, timeout=60, check=False).returncode == 0
        )
    assert path.read_text() == "child out\nparent\n"
    assert other.read_text() == "child err\n"


def test_lost_lines_are_counted_at_their_place(tmp_path: Path) -> None:
    """Memory holds so much; the log itself says where something is missing."""
    code = (
        "import titan_ft.run.output as output; output.WAITING_BYTES = 40\n"
        + PROTECT
        + "print('first'); limit(6)\n"
        "for n in range(10): print(f'line {n:03}.')\nlimit(-1); print('last')"
    )
    path = tmp_path / "log"
    assert run(LIMIT + code, path)[0] == 0
    lines = path.read_text().splitlines()
    assert lines[:5] == ["first", "line 000.", "line 001.", "line 002.", "line 003."]
    assert lines[5].startswith("titan_ft: 7 lines of ")  # with the one that ended the wait
    assert lines[5].endswith(" are lost here: File too large")
    assert len(lines) == 6


def test_streams_stay_what_they_are(tmp_path: Path) -> None:
    """Encoding, errors, descriptor and name are those of before; a stream that somebody replaced is
    left alone.
    """
    code = (
        "import io, sys\nbefore = [(s.encoding, s.errors, s.fileno(), s.isatty()) for s in (sys.stdout, sys.stderr)]\n"
        + PROTECT
        + "after = [(s.encoding, s.errors, s.fileno(), s.isatty()) for s in (sys.stdout, sys.stderr)]\n"
        "assert before == after, (before, after)\nassert sys.stdout is not sys.__stdout__\n"
        "sys.stdout.write('no newline'); sys.stdout.flush()\n"
        "sys.stderr = own = io.StringIO()\n" + PROTECT + "assert sys.stderr is own"
    )
    assert run(code, tmp_path / "log") == (0, "")
    assert (tmp_path / "log").read_text() == "no newline"


def test_reader_that_is_gone_is_told(tmp_path: Path) -> None:
    """A closed pipe is no full disk."""
    code = PROTECT + "try: print('x')\nexcept BrokenPipeError: print('gone', file=sys.stderr)"
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", "import sys\n" + code]
    ran = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writes)
    assert ran.stderr.decode().splitlines()[0] == "gone"


def test_a_line_is_one_write(tmp_path: Path) -> None:
    """What several processes print into one log is not mixed within a line."""
    code = (
        PROTECT
        + "import os, threading\nfor n in range(200): print('aaaaaaaa', 'bbbbbbbb', sep='', end='cc\\n')"
    )
    path = tmp_path / "log"
    with path.open("ab") as out:
        processes = [subprocess.Popen([sys.executable, "-c", code], stdout=out) for _ in range(2)]
        assert [process.wait(60) for process in processes] == [0, 0]
    assert set(path.read_text().splitlines()) == {"aaaaaaaabbbbbbbbcc"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_native_code_prints_into_a_pipe(tmp_path: Path) -> None:
    """Its writes succeed on a full disk; with room everything is in the file in the end, and the
    descriptor is back.
    """
    code = (
        "import os\nfrom titan_ft.run.output import protected_native_output\n"
        "with protected_native_output():\n    for n in range(1000): os.write(2, b'native %d\\n' % n)\n"
        "os.write(2, b'after\\n')"
    )
    path = tmp_path / "log"
    assert run(code, tmp_path / "out", path)[0] == 0
    assert path.read_text().splitlines() == [
        *(f"native {number}" for number in range(1000)),
        "after",
    ]
    assert (
        run(code.replace("os.write(2, b'after\\n')", ""), tmp_path / "out", Path("/dev/full"))[0]
        == 0
    )


CLIENT = """
from datetime import timedelta
from torchft.coordination import LighthouseServer, ManagerServer

limit = timedelta(seconds=20)
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
port = lighthouse.address().rsplit(":", 1)[1]
ManagerServer(
    replica_id="x", lighthouse_addr=f"http://SECRET@127.0.0.1:{port}", hostname="127.0.0.1",
    bind="127.0.0.1:0", store_addr="x", world_size=1, heartbeat_interval=limit,
    connect_timeout=limit, quorum_retries=0,
).shutdown()
lighthouse.shutdown()
"""


@pytest.mark.parametrize("given", ["", "error", "info", "off", "info,torchft::manager=warn"])
def test_torchft_logs_no_secret(given: str) -> None:
    """At "info" its client logs the lighthouse's address, in which the run's secret travels."""
    chosen = choose_native_log({"RUST_LOG": given})
    result = subprocess.run(
        [sys.executable, "-c", CLIENT],
        env={**os.environ, "RUST_LOG": chosen},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "SECRET" not in result.stdout + result.stderr
    assert "[INFO]" not in result.stderr
