# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The active lighthouse among several of a job: the one named in a file in the run's folder.

A lighthouse that wants to serve writes its name there first, and one that reads another's name
there steps down. That settles within moments two that write at once, and one that was only slow and
returns. Groups take no new members from a lighthouse that is no longer named
(`membership/seat.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.run.lighthouse import Announcement, answers

SILENT_SECONDS = 0.8
"""Without an answer, after which a standby takes the announced lighthouse's place."""
_ANSWER_SECONDS = 0.5  # that one answer may take
_LOOK_SECONDS = _ANSWER_SECONDS + 0.2
"""What one look counts for at most: who was stopped for longer, or starved, has not listened for
all of it.
"""


class Succession:
    """One lighthouse's part in the succession.

    Args:
        path: the file.
        own: what this lighthouse announces.
        standby: whether it leaves an announced lighthouse that answers in its place.
        token: the run's shared secret.
        ask: returns whether a lighthouse answers.

    Attributes:
        serves: whether it has announced itself.
        other: the other announced lighthouse, as far as known.
    """

    def __init__(
        self,
        path: Path,
        own: Announcement,
        *,
        standby: bool,
        token: str = "",
        ask: Callable[[str, str, float], bool] = answers,
    ) -> None:
        self._path, self._own, self._standby = path, own, standby
        self._token, self._ask = token, ask
        self._looked = time.monotonic()
        self._silent = 0.0  # seconds since the other one was known to be there
        self.serves = False
        self.other: Announcement | None = None

    def poll(self) -> bool:
        """Read the file once, and announce this lighthouse at its turn; return False if it must
        step down.

        Raises:
            OSError: the file cannot be written.
        """
        said = Announcement.read(self._path)
        if self.serves:
            self.other = said if said is not None and said.id != self._own.id else None
            return self.other is None
        # Just now.
        announced = said is not None and (self.other is None or said.id != self.other.id)
        # A storage that cannot be read for a moment takes nobody's place away.
        self.other = said or self.other
        # This lighthouse may have started anew: it would wait for itself at its own address.
        other = (
            self.other if self.other is None or self.other.address != self._own.address else None
        )
        answered = False
        if self._standby and other is not None:
            answered = self._ask(other.address, self._token, _ANSWER_SECONDS)
        now = time.monotonic()
        self._silent = (
            0.0 if announced or answered else self._silent + min(now - self._looked, _LOOK_SECONDS)
        )
        self._looked = now
        if not self._standby or self._silent >= SILENT_SECONDS:
            self._own.write(self._path)
            self.serves, self.other = True, None
        return True
