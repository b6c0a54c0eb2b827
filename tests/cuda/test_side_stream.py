# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A stream that several threads use at once."""

from __future__ import annotations

import threading

import torch

from titan_ft import device

DEADLINE = 20.0  # seconds; only ever reached by a bug


def test_two_threads_in_one_side_stream_go_back_to_their_own() -> None:
    """An exchange's thread may leave the side stream while the training thread is in it; each
    returns to its own.
    """
    where, entered, leave = torch.device("cuda", 0), threading.Event(), threading.Event()
    after = list[torch.Stream]()
    own, default = torch.Stream(where), torch.accelerator.current_stream(where)

    def use() -> None:
        with device.side_stream(where):
            entered.set()
            assert leave.wait(DEADLINE)
        after.append(torch.accelerator.current_stream(where))

    thread = threading.Thread(target=use)
    thread.start()
    assert entered.wait(DEADLINE)
    with own:
        with device.side_stream(where):
            leave.set()
            thread.join(DEADLINE)
        assert torch.accelerator.current_stream(where) == own
    assert after == [default]
