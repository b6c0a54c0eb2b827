# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The address of the lighthouse: fixed, under a name, or announced in a file.

On a cluster the lighthouse may die with its node and restart on another node. It then announces
itself in a file of the run's folder. Of two lighthouses, the file alone decides which one counts.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import ipaddress
import json
import os
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_ft.system.address import split_address
from titan_ft.system.ownership import make_folder, no_follow, read_note
from titan_ft.system.seal import lighthouse_secret

FILE_PREFIX = "file:"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Announcement:
    """The lighthouse's entry in the file.

    Attributes:
        address: http://host:port.
        job: Slurm's id of its job; empty outside Slurm.
        host: name of its host.
        id: differs for each process, because a new one may have the address of its predecessor.
    """

    address: str
    job: str = ""
    host: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of_this_process(cls, address: str, environ: Mapping[str, str]) -> Announcement:
        """Return this process's announcement."""
        return cls(address, environ.get("SLURM_JOB_ID", ""), socket.gethostname())

    def write(self, path: Path) -> None:
        """Write the announcement atomically: readers see either this one or the previous one.

        Raises:
            OSError: the file cannot be written.
        """
        self.prepare(path)
        self._part(path).replace(path)

    def prepare(self, path: Path) -> None:
        """Take the room that `write` needs, so that a standby can take over on a full disk.

        Raises:
            OSError: there is no room, or the folder cannot be written.
        """
        part = self._part(path)
        if part.exists():
            return
        make_folder(path.parent)
        try:
            with open(part, "w", opener=no_follow) as file:
                file.write(json.dumps(asdict(self)) + "\n")
                file.flush()
                # On a network file system, the name could appear before the bytes.
                os.fsync(file.fileno())
        except OSError:
            self.discard(path)
            raise

    def discard(self, path: Path) -> None:
        """Give back the room that `prepare` took, if `write` was not called."""
        with contextlib.suppress(OSError):
            self._part(path).unlink(missing_ok=True)

    def _part(self, path: Path) -> Path:
        return path.with_name(f".{path.name}-{self.id}")

    @classmethod
    def read(cls, path: Path) -> Announcement | None:
        """Return the announcement in a file; None if there is none, or it is not whole."""
        try:
            text = read_note(path)
        except FileNotFoundError:
            # NFS remembers for up to a minute that a name is missing. Listing the folder makes it
            # look again.
            with contextlib.suppress(OSError), os.scandir(path.parent) as names:
                next(names, None)
            return None
        except (OSError, UnicodeDecodeError):
            return None
        try:
            entry = json.loads(text)
            found = cls(
                address=str(entry["address"]),
                job=str(entry["job"]),
                host=str(entry["host"]),
                id=str(entry["id"]),
            )
            split_address(found.address)
        except (ValueError, KeyError, TypeError):
            return None
        return found


@dataclass(frozen=True)
class Place:
    """One place of the lighthouse.

    Attributes:
        url: http://host:port.
        mark: distinguishes two lighthouses with the same url: the id of the process that announced
            itself, or the addresses that the name stands for.
        job: Slurm's id of the lighthouse's job; empty if unknown.
    """

    url: str
    mark: str = ""
    job: str = ""


class LighthouseAddress:
    """The lighthouse's address; its text is the address in use now.

    Args:
        source: http://host:port, or file:PATH.
        token: the run's shared secret; empty = the lighthouse has no gate.

    Attributes:
        place: the place in use; None until the file has one.
        is_file: True if the source is a file.
        may_change: True if `look` can find another place than before.
    """

    def __init__(self, source: str, token: str = "") -> None:
        self.source = source
        self._secret = lighthouse_secret(token)
        self.is_file = source.startswith(FILE_PREFIX)
        self._path = Path(source.removeprefix(FILE_PREFIX))
        self.may_change = self.is_file or not _is_numeric(source)
        self.place: Place | None = None if self.is_file else Place(source)

    def __str__(self) -> str:
        return self.source if self.place is None else self.place.url

    def url_for_client(self, url: str) -> str:
        """Return a url with the secret for the gate.

        For torchft's client alone: no log may show this url.
        """
        if not self._secret:
            return url
        return url.replace("//", f"//{self._secret}@", 1)

    def conceal(self, text: str) -> str:
        """Return a text of torchft's client without the secret."""
        if not self._secret:
            return text
        return text.replace(self._secret, "...")

    def refuses(self, seconds: float) -> bool:
        """True if the lighthouse's gate replies that this run's secret is wrong or missing.

        The gate sends that reply over HTTP/1 only.
        """
        try:
            with open_page(str(self), "/status", self._secret, seconds):
                return False
        except urllib.error.HTTPError as error:
            return error.code == http.HTTPStatus.FORBIDDEN
        except (OSError, ValueError, http.client.HTTPException):
            # The lighthouse is away, so its answer is unknown.
            return False

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an HTTP/1 request to the lighthouse."""
        return authorization(self._secret)

    def look(self) -> Place | None:
        """Return the present place of the lighthouse; None if unknown.

        The place in use does not change.
        """
        if not self.may_change:
            return self.place
        if not self.is_file:
            mark = " ".join(sorted(_resolve(self.source)))
            return Place(self.source, mark) if mark else None
        said = Announcement.read(self._path)
        return None if said is None else Place(said.address, said.id, said.job)

    def wait(self, seconds: float) -> str:
        """Return the address; wait for its announcement if needed.

        Raises:
            TimeoutError: no address was announced within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while self.place is None:
            self.place = self.look()
            if self.place is not None:
                break
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no lighthouse has announced itself in {self._path} within {seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)
        return self.place.url


def authorization(secret: str) -> dict[str, str]:
    """Return the header that shows the secret to the gate (see `titan_ft.launch.greeting`)."""
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def open_page(address: str, path: str, secret: str, seconds: float) -> Any:
    """Open one of the lighthouse's pages.

    Raises:
        OSError, ValueError, HTTPException: the lighthouse does not answer.
    """
    return build_opener(authorization(secret)).open(f"{address}{path}", timeout=seconds)


def build_opener(headers: Mapping[str, str]) -> Any:
    """Return an opener for the lighthouse's pages, with these headers."""
    # No proxy: a proxy of the environment could not reach the lighthouse.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.addheaders = [*headers.items()]
    return opener


def answers(address: str, token: str, seconds: float) -> bool:
    """Return True if a lighthouse answers.

    A connection alone shows nothing: the kernel accepts it even for a stopped process.
    """
    try:
        with open_page(address, "/", lighthouse_secret(token), seconds) as answer:
            answer.read(1)
    except (OSError, ValueError, http.client.HTTPException):
        # Another program on the port may answer anything.
        return False
    return True


def _is_numeric(url: str) -> bool:
    try:
        ipaddress.ip_address(split_address(url)[0])
    except ValueError:
        return False
    return True


def _resolve(url: str) -> Iterator[str]:
    """Yield the numeric addresses of the name in a url; none if no resolver knows it now."""
    with contextlib.suppress(OSError):
        for _, _, _, _, address in socket.getaddrinfo(*split_address(url), type=socket.SOCK_STREAM):
            yield str(address[0])
