# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tokens and token files that keep other users and other hosts out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_ft.config import ConfigError
from titan_ft.system.token import MIN_BYTES, check_private, check_token, read_token

LONG = "0123456789abcdef"


@pytest.mark.parametrize("token", ["", "x", "hunter2", LONG[:-1]])
def test_a_token_that_anybody_finds_is_refused_off_loopback(token: str) -> None:
    """With an empty token everybody can compute the proofs. A short token can be found offline."""
    with pytest.raises(
        ConfigError, match=rf"TITAN_FT_TOKEN must be set .* at least {MIN_BYTES} bytes, got"
    ) as caught:
        check_token(token, is_local=False)
    assert "\n" not in str(caught.value)
    assert not token or f"got {len(token)} bytes" in str(caught.value)
    assert len(token) < 2 or token not in str(caught.value)
    check_token(token, is_local=True)


def test_a_long_token_is_taken() -> None:
    """The length in bytes counts."""
    check_token(LONG, is_local=False)
    check_token("\N{SNOWMAN}" * 6, is_local=False)


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    """The variable has priority. The file's last line feed does not belong to the token."""
    file = tmp_path / "token"
    file.write_text(f"{LONG}\n")
    file.chmod(0o400)
    assert read_token({}) == ""
    assert read_token({"TITAN_FT_TOKEN_FILE": str(file)}) == LONG
    assert read_token({"TITAN_FT_TOKEN_FILE": str(file), "TITAN_FT_TOKEN": "other"}) == "other"


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """Otherwise the worker would have no token."""
    with pytest.raises(
        ConfigError, match=r"TITAN_FT_TOKEN_FILE must name a file .*No such file"
    ) as caught:
        read_token({"TITAN_FT_TOKEN_FILE": str(tmp_path / "none")})
    assert "\n" not in str(caught.value)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes").chmod(0o600)
    with pytest.raises(ConfigError, match="it is no text"):
        read_token({"TITAN_FT_TOKEN_FILE": str(tmp_path / "bytes")})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o660])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    """The mode of the file decides."""
    file = tmp_path / "token"
    file.write_text(LONG)
    file.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"readable by you alone, got mode {mode:o} of .*chmod 600"
    ):
        read_token({"TITAN_FT_TOKEN_FILE": str(file)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """The file's owner can read and change it, whatever its mode is."""
    file = tmp_path / "token"
    file.write_text(LONG)
    file.chmod(0o400)
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_token({"TITAN_FT_TOKEN_FILE": str(file)})


def test_a_file_server_that_maps_this_user_is_no_stranger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most file servers map root to nobody. The mode counts as for any other file of this user."""
    file = tmp_path / "token"
    file.write_text(LONG)
    file.chmod(0o400)
    mapped = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mapped + 1)
    monkeypatch.setattr("titan_ft.system.ownership.ROOT", mapped + 2)
    monkeypatch.setattr("titan_ft.system.token.ROOT", mapped + 2)
    assert read_token({"TITAN_FT_TOKEN_FILE": str(file)}) == LONG
    file.chmod(0o440)
    with pytest.raises(ConfigError, match="mode 440"):
        read_token({"TITAN_FT_TOKEN_FILE": str(file)})


def test_a_file_of_root_may_be_read_by_the_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubernetes provides a Secret in this way to a pod of another user, which is alone in that
    group.
    """
    found = os.stat_result((0o100440, 0, 0, 1, 0, 1000, 0, 0, 0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check_private(tmp_path, found, "TITAN_FT_TOKEN_FILE")
    with pytest.raises(ConfigError, match="mode 460"):
        check_private(tmp_path, os.stat_result((0o100460, *found[1:])), "TITAN_FT_TOKEN_FILE")
