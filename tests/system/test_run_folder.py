# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's folder that another user has made, or may write."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_ft.chaos.orders import Order
from titan_ft.config import ConfigError
from titan_ft.launch.group.agent import replace_link
from titan_ft.launch.group.worker_group import open_log
from titan_ft.run import appender
from titan_ft.run.appender import FileAppender
from titan_ft.run.curve_file import CurveFile
from titan_ft.run.error_file import read_error
from titan_ft.run.events import Hung
from titan_ft.run.held import is_held
from titan_ft.run.lighthouse import Announcement
from titan_ft.run.log import EventLog
from titan_ft.run.marks import leave_mark
from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import no_follow, only_files, write_for_owner_only
from titan_ft.system.run_folder import check_run_folder
from titan_ft.system.threads import call_aside
from titan_ft.system.whole_file import write_whole
from titan_ft.training.checkpoint.damage import FailedLoad
from titan_ft.training.finished import finished_step

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def no_record_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A record that still waited after its test would be written, or lost, in a later one."""
    monkeypatch.setattr("titan_ft.run.log.FINISH_SECONDS", 0.0)
    yield
    assert appender._appenders_with_outage == {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a run's folder as it is made."""
    found = tmp_path / "run"
    found.mkdir(mode=0o755)
    return found


def test_a_folder_of_ones_own_is_taken(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed for an own folder, nor for a folder that does not exist yet."""
    (folder / "config.toml").touch()
    check_run_folder(folder)
    check_run_folder(folder / "none")
    assert str(folder) not in capfd.readouterr().err


@as_root
@pytest.mark.parametrize("planted", ["", "file", "checkpoint", "link"])
def test_a_folder_of_another_user_is_refused(folder: Path, planted: str) -> None:
    """So is a folder in which another user made a file, a checkpoint or a link."""
    target = folder / "config.toml" if planted else folder
    if planted == "file":
        target.touch()
    elif planted == "checkpoint":
        target = folder / "checkpoint"
        target.mkdir()
    elif planted == "link":
        target.symlink_to(folder)  # at something of this user
    os.chown(target, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(
        ConfigError, match=rf"--run-dir must be yours alone.*{target} belongs to user {NOBODY}"
    ):
        check_run_folder(folder)


@as_root
def test_a_link_of_another_user_is_refused(folder: Path) -> None:
    """The link's owner can point it elsewhere at any moment."""
    link = folder.parent / "link"
    link.symlink_to(folder)
    check_run_folder(link)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"{link} belongs to user {NOBODY}"):
        check_run_folder(link)


@pytest.mark.parametrize(("mode", "num_lines"), [(0o777, 1), (0o1777, 0), (0o755, 0)])
def test_a_folder_above_that_everybody_may_write_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: int, num_lines: int
) -> None:
    """In a world-writable parent every user may rename the run's folder and make another one of its
    name.
    """
    above = tmp_path / "above"
    folder = above / "runs" / "1"
    folder.mkdir(parents=True)
    above.chmod(mode)
    check_run_folder(folder)
    lines = [line for line in capfd.readouterr().err.splitlines() if f"{above} " in line]
    assert len(lines) == num_lines


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o757, True), (0o1777, False)])
def test_a_folder_that_everybody_may_write_is_refused(
    folder: Path, mode: int, is_refused: bool
) -> None:
    """A folder with the sticky bit is not."""
    folder.chmod(mode)
    if not is_refused:
        check_run_folder(folder)
        return
    with pytest.raises(
        ConfigError, match=rf"which every user may write \(mode {mode:o}\); chmod o-w"
    ) as caught:
        check_run_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_the_group_may_write_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A group-writable folder is common with the umask 002."""
    folder.chmod(0o775)
    check_run_folder(folder)
    assert capfd.readouterr().err.count(f"the group may write {folder}") == 1


def test_a_file_server_that_maps_this_user_is_no_stranger(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most file servers map root to nobody, who then owns its new files."""
    with tempfile.TemporaryFile(dir=folder) as file:
        mapped = os.fstat(file.fileno()).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mapped + 1)
    monkeypatch.setattr("titan_ft.system.ownership.ROOT", mapped + 2)
    check_run_folder(folder)
    own = SimpleNamespace(st_uid=mapped + 1, st_size=0)
    monkeypatch.setattr(os, "fstat", lambda _: own)
    with pytest.raises(ConfigError, match=f"belongs to user {mapped};"):
        check_run_folder(folder)


@as_root
def test_a_folder_of_another_user_that_cannot_be_probed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's entries may be open to all although the folder itself is not."""

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    os.chown(folder, NOBODY, -1)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        check_run_folder(folder)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Provide a file of this user that must not change."""
    found = tmp_path / "bashrc"
    found.write_text("mine\n")
    return found


def test_events_are_not_written_through_a_link(folder: Path, victim: Path) -> None:
    """No file that this opener opens is reached through a link."""
    (folder / "events.jsonl").symlink_to(victim)
    events = FileAppender(folder / "events.jsonl")
    events.append(b"{}\n")
    assert events.outage is not None, "the record waits, as it does for a disk that has failed"
    events.close(0.0)
    with (
        pytest.raises(OSError, match="symbolic links"),
        open(folder / "events.jsonl", "w", opener=no_follow),
    ):
        pass
    assert victim.read_text() == "mine\n"


def test_an_announcement_is_not_written_through_a_link(folder: Path, victim: Path) -> None:
    """The lighthouse's file is written beside its place first."""
    announcement = Announcement("http://10.0.0.1:29510", "job", "host", "id")
    (folder / ".lighthouse.json-id").symlink_to(folder / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        announcement.prepare(folder / "lighthouse.json")
    assert not (folder / "elsewhere").exists()


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Restore the umask of this process."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("given", "expected"), [(0o002, 0o022), (0o022, 0o022), (0o077, 0o077), (0o000, 0o022)]
)
def test_nobody_else_may_write_what_a_run_makes(
    usual_umask: None, given: int, expected: int
) -> None:
    """A stricter umask of the user stays."""
    os.umask(given)
    write_for_owner_only()
    assert os.umask(0o022) == expected


@as_root
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_nothing_is_written_through_a_folder_that_is_anothers_link(
    folder: Path, tmp_path: Path, owner: int
) -> None:
    """Such as TensorBoard's folder, which a member of the group can plant. A user may put it on
    other storage by a link of his own.
    """
    home = tmp_path / "home"
    home.mkdir()
    (folder / "tb").symlink_to(home)
    os.chown(folder / "tb", owner, owner, follow_symlinks=False)
    said: list[str] = []
    curves = CurveFile(folder / "tb" / "replica_0", said.append)
    curves.add(1, {"loss": 2.0}, 0.0, anew=False)
    curves.close()
    if owner == NOBODY:
        with pytest.raises(OSError, match=f"a link that belongs to user {NOBODY}"):
            write_whole(folder / "tb" / "index.html", b"")
        assert list(home.iterdir()) == []
        assert f"a link that belongs to user {NOBODY}" in said[0]
    else:
        write_whole(folder / "tb" / "index.html", b"")
        assert sorted(path.name for path in home.iterdir()) == ["index.html", "replica_0"]
        assert said == []


def write_event(file: Path) -> None:
    """Write an event, and close its log."""
    log = EventLog(file)
    log.emit(SECOND)
    log.close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "announcement": lambda folder: Announcement("http://h:1").write(folder / "run" / "lighthouse"),
    "link to the latest logs": lambda folder: replace_link(folder / "0", folder / "g" / "latest"),
    "mark": lambda folder: leave_mark(folder / "rank-0.error.json.left", "left"),
    "order": lambda folder: ORDER.append_to(folder / "chaos" / "orders.jsonl"),
    "note of a checkpoint": lambda folder: NOTE.write(folder),
    "events": lambda folder: write_event(folder / "events" / "a.jsonl"),
}
ORDER = Order(fault="kill_rank", params={}, seed=0, shot=1)
NOTE = FailedLoad(save_id="", damaged=True, reason="", by="", time="")
SECOND = Hung(step=1)


@as_root
@pytest.mark.parametrize("owner", [0, NOBODY])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_no_writer_writes_through_a_folder_that_is_anothers_link(
    folder: Path, tmp_path: Path, write: Callable[[Path], None], owner: int
) -> None:
    """Not even folders are made there."""
    home = tmp_path / "home"
    home.mkdir()
    (folder / "planted").symlink_to(home)
    os.chown(folder / "planted", owner, owner, follow_symlinks=False)
    with contextlib.suppress(OSError):
        write(folder / "planted")
    assert any(home.iterdir()) == (owner != NOBODY)


READERS: dict[str, Callable[[Path], object]] = {
    "announcement": Announcement.read,
    "error of a worker": read_error,
    "mark of the end": lambda path: finished_step(path, ""),
    "lock of a launch": lambda path: is_held(RunPaths(path.parent)),
}


@pytest.mark.parametrize("planted", ["pipe", "zeros"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_no_reader_waits_for_a_planted_file_or_fills_its_memory(
    folder: Path, read: Callable[[Path], object], planted: str
) -> None:
    """The opening of a pipe waits for a writer that never comes. A sparse file costs nothing."""
    path = RunPaths(folder).config
    if planted == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 30)
    tracemalloc.start()
    try:
        assert not call_aside(partial(read, path), "reader").result(10.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def swap_for_link(folder: Path, target: Path) -> None:
    """Put another user's link in the place of a folder."""
    folder.rename(folder.with_name("away"))
    folder.symlink_to(target)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)


@as_root
def test_a_removed_file_is_not_made_again_through_a_link(folder: Path, tmp_path: Path) -> None:
    """The folder was the run's own when the file was first opened."""
    home, file = tmp_path / "home", folder / "events" / "a.jsonl"
    home.mkdir()
    events = FileAppender(file)
    events.append(b"{}\n")
    file.unlink()
    swap_for_link(file.parent, home)
    events.append(b"{}\n")
    assert events.outage is not None
    events.close(0.0)
    assert list(home.iterdir()) == []


@as_root
def test_no_next_file_of_events_is_made_through_a_link(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events go on in the present file."""
    monkeypatch.setattr("titan_ft.run.log.ROTATE_BYTES", 1)
    home, file = tmp_path / "home", folder / "events" / "a.jsonl"
    home.mkdir()
    log = EventLog(file)
    log.emit(Hung(step=1))
    swap_for_link(file.parent, home)
    log.emit(Hung(step=2))
    log.close()
    assert list(home.iterdir()) == []
    steps = [
        json.loads(line)["step"] for line in (folder / "away" / "a.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2]


@as_root
def test_a_link_above_the_users_own_folders_is_followed(tmp_path: Path) -> None:
    """Such as /scratch. With the links of all parents refused, a run there lost every event."""
    (tmp_path / "storage").mkdir()
    others = tmp_path / "others"
    others.mkdir()
    (others / "scratch").symlink_to(tmp_path / "storage")
    for path in (others, others / "scratch"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    (tmp_path / "storage" / "run").mkdir()
    write_whole(others / "scratch" / "run" / "index.html", b"page")
    assert (tmp_path / "storage" / "run" / "index.html").read_bytes() == b"page"


@as_root
def test_no_log_is_written_through_a_folder_that_is_anothers_link(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its lines go to this process's own output, which says so."""
    home = tmp_path / "home"
    home.mkdir()
    (folder / "logs").symlink_to(home)
    os.chown(folder / "logs", NOBODY, NOBODY, follow_symlinks=False)
    with open_log(folder / "logs" / "replica-0" / "rank-0.log") as log:
        log.write(b"a line\n")
    assert list(home.iterdir()) == []
    said = capfd.readouterr().err
    assert "cannot be written" in said
    assert said.endswith("a line\n")


def test_the_group_may_not_write_a_new_file(usual_umask: None, tmp_path: Path) -> None:
    """At the umask 002, which many systems have, and where `write_for_owner_only` has not run."""
    with open(tmp_path / "new", "w", opener=no_follow):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644


def test_a_file_with_a_lease_is_read_when_the_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of NFS holds one for a client. An open that may not block fails meanwhile."""
    path = tmp_path / "a.jsonl"
    path.write_text("an event")
    with open(path, opener=only_files) as file:
        assert os.get_blocking(file.fileno()), "a read waits for its data"
    system_open = os.open

    def open_with_lease(name: str, flags: int) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)
        return system_open(name, flags)

    monkeypatch.setattr(os, "open", open_with_lease)
    with open(path, opener=only_files) as file:
        assert file.read() == "an event"
