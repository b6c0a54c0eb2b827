# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An agent of fake workers on a thread of the test, which spares each test another import of
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from titan_ft.launch.group.agent import Agent, GroupSpec
from titan_ft.launch.group.worker_group import PlainStarter
from titan_ft.system.stop import StopRequests


class Supervised:
    """Replica 0, with real workers that are the test's own children. A context, whose end ends
    them.
    """

    def __init__(
        self,
        run: Any,
        num_ranks: int = 1,
        module: str = "fake_worker",
        more_env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        flags = [f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=0"]
        env = {name: run.env[name] for name in ("FAKE_WORKERS", "PYTHONPATH")} | dict(
            more_env or {}
        )
        spec = GroupSpec(
            run.paths.root,
            num_ranks,
            "http://127.0.0.1:1",
            module=module,
            args=flags,
            env=env,
            **settings,
        )
        self.stop = StopRequests()  # called as a signal handler would be
        self._agent = Agent(spec, self.stop, PlainStarter())
        self._codes: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self._codes.append(self._agent.run()), daemon=True
        )

    def __enter__(self) -> Supervised:
        self._thread.start()
        return self

    def wait(self, seconds: float = 20.0) -> int:
        """Return the exit status."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the agent did not end within {seconds} s"
        return self._codes[0]

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.stop()
        self._thread.join(30.0)
