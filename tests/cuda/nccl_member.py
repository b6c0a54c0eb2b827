# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One member of an exchange over NCCL: nccl_member.py RANK NUM_RANKS STORE_PORT.

Reads commands from standard input, one a line: a function of this file, and its arguments in JSON.
Writes a line of JSON for each: the command's name and its facts. `break_off` runs at once, the
others one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from benchmarks.member_facts import exchange_with
from titan_ft.gradients import half, quantize
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.gradients.flight import ExchangeError
from titan_ft.membership.process_group import AbortableNccl
from titan_ft.protocol.member import Member, Quorum

RANK, NUM_RANKS, PORT = (int(argument) for argument in sys.argv[1:4])
TIMEOUT = timedelta(seconds=float(os.environ.get("MEMBER_TIMEOUT", "60")))
NUMELS = (3000, 70, 1 << 18)  # of the parameters; each has a bucket of its own


class Seat:
    """Stands in for a Membership: the members are those of the last `configure`."""

    timeout = TIMEOUT

    def __init__(self) -> None:
        self.process_group = AbortableNccl(TIMEOUT)
        self.members: tuple[int, ...] = ()

    def await_quorum(self) -> Quorum:
        members = tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in self.members)
        return Quorum("key", self.members.index(RANK), members, max_step=0)

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self) -> None:
        self.process_group.abort()


def gradients(rank: int) -> list[torch.Tensor]:
    """Return the gradients that a rank gives, in host memory."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


class State:
    """State shared by the commands."""

    def __init__(self) -> None:
        self.seat = Seat()
        self.parameters = [
            torch.nn.Parameter(torch.zeros(numel, device="cuda")) for numel in NUMELS
        ]
        self.exchange = self.build("float32")

    def build(self, travels_in: str) -> GradientExchange:
        self.travels_in = travels_in
        exchange = GradientExchange(
            self.parameters,
            self.seat,  # type: ignore[arg-type]
            bucket_bytes=1,
            where=torch.device("cuda", torch.cuda.current_device()),
            overlap=False,
            quantize=travels_in == "8 bits",
            dtype=torch.bfloat16 if travels_in == "bfloat16" else torch.float32,
        )
        if hasattr(exchange, "rehearse"):
            self.seat.process_group.rehearse = exchange.rehearse
        return exchange


def travels_in(state: State, name: str) -> dict[str, Any]:
    """Build the exchange whose gradients travel so."""
    state.exchange = state.build(name)
    return {}


def configure(state: State, name: str, members: list[int], seconds: float = 20.0) -> dict[str, Any]:
    """Build the communicator of a quorum, as `Rendezvous.configure` does."""
    nccl, began = state.seat.process_group, time.monotonic()
    state.seat.members = tuple(members)
    nccl.set_timeout(timedelta(seconds=seconds))
    error = ""
    try:
        nccl.configure(
            f"127.0.0.1:{PORT}/{name}", members.index(RANK), len(members), 1, 0, 1, members
        )
    except (RuntimeError, TimeoutError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        nccl.set_timeout(TIMEOUT)
    return {"error": error, "seconds": time.monotonic() - began}


def exchange(state: State, seconds: float | None = None, slow_rows: bool = False) -> dict[str, Any]:
    """Exchange gradients; report whether the sums equal those of the same functions on the CPU.

    Args:
        slow_rows: the launch of the rows' sum does not end by itself.
    """

    def describe(quorum: Quorum) -> tuple[list[float], bytes]:
        if slow_rows:
            knob(state, "FAKE_NCCL_LAUNCH_MS", "100000")
            print("describes", file=sys.stderr, flush=True)
        return [float(RANK)], f"from {RANK}".encode()

    for parameter, gradient in zip(state.parameters, gradients(RANK), strict=True):
        parameter.grad = gradient.cuda()
    state.exchange.drop_residuals()  # of 8 bits: each exchange sums the same
    state.seat.timeout = TIMEOUT if seconds is None else timedelta(seconds=seconds)
    began = time.monotonic()
    try:
        reduced = exchange_with(state.exchange, describe)
    except ExchangeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    reduced.sums.write(1.0)
    members = state.seat.members
    expected = [
        expect(state.travels_in, list(parts))
        for parts in zip(*map(gradients, members), strict=True)
    ]
    right = reduced.rows == [[float(member)] for member in members]
    right &= reduced.messages == [f"from {member}".encode() for member in members]
    for parameter, total in zip(state.parameters, expected, strict=True):
        assert parameter.grad is not None
        right &= torch.equal(parameter.grad.cpu(), total)
    return {"error": "", "right": right, "seconds": time.monotonic() - began}


def expect(travels_in: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum the members' parts on the CPU, in their order."""
    number, weight = len(parts), torch.ones(1)
    if travels_in == "bfloat16" and number > 1:
        rows = [half.cut(part.bfloat16(), weight, number) for part in parts]
        sums = [half.add_up(torch.stack([row[to] for row in rows]), 1)[0] for to in range(number)]
        return torch.cat(sums)[: parts[0].numel()].float()
    if travels_in == "8 bits" and number > 1:
        payloads = [quantize.encode(torch.cat([part, weight]), 1) for part in parts]
        total = torch.empty(parts[0].numel() + 1)
        quantize.add_up(torch.stack(payloads), 1, total)
        return total[:-1]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def count(state: State) -> dict[str, Any]:
    """Count the resources of this process: threads of torch and NCCL, descriptors, bytes mapped
    from shared memory.
    """
    tasks = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = sum("fakenccl" in line for line in maps)
    # Each stream of torch's pool is a thread of the stand-in's.
    threads = sorted(task for task in tasks if task != "fakecuda" and not task.startswith("python"))
    return {
        "threads": [task for task in threads if "nccl" in task or "titan" in task],
        "num_threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mapped": shared,
        "memory": torch.cuda.memory_allocated(),
    }


def settle(state: State, before: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Wait until this process holds what it held before, without a garbage collection."""
    until = time.monotonic() + seconds
    now = count(state)
    while not before.items() <= now.items() and time.monotonic() < until:
        time.sleep(0.1)
        now = count(state)
    return now


def reconfigure(state: State, name: str, number: int, members: list[int]) -> dict[str, Any]:
    """Build communicators one after the other, each for one exchange."""
    for index in range(number):
        made = configure(state, f"{name}{index}", members)
        done = exchange(state)
        if made["error"] or not done.get("right"):
            return {"failed": [index, made, done]}
    state.seat.process_group.abort(errored=False)
    return {"failed": None}


def knob(state: State, name: str, value: str) -> dict[str, Any]:
    """Set a variable of the stand-in, which does not see Python's os.environ."""
    ctypes.CDLL(None).setenv(name.encode(), value.encode(), 1)
    return {}


def facts(state: State) -> dict[str, Any]:
    """Return torch's facts about the current communicator."""
    pg = state.seat.process_group._pg.pg
    backend = pg._get_backend(torch.device("cuda"))
    ones = torch.ones(1, device="cuda")
    pg.allreduce([ones]).wait()
    ones.cpu()
    return {
        "timeout_minutes": backend.options._timeout / timedelta(minutes=1),
        "max_ctas": backend.options.config.max_ctas,
        "high_priority": backend.options.is_high_priority_stream,
        "error_handling": os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
    }


def shorten(state: State, seconds: float) -> dict[str, Any]:
    """Have torch's watchdog give an operation no longer than so."""
    state.seat.process_group._pg.pg._get_backend(torch.device("cuda")).set_timeout(
        timedelta(seconds=seconds)
    )
    return {}


def block_import(state: State, name: str) -> dict[str, Any]:
    """Let an import of a module take as long as this process lives."""

    def find_spec(wanted: str, *_: Any) -> None:
        if wanted == name:
            threading.Event().wait()

    assert name not in sys.modules
    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))  # type: ignore[arg-type]
    return {}


def break_off(state: State) -> dict[str, Any]:
    """Abort, as a pulse does when it learns of a lost member."""
    state.seat.process_group.abort()
    return {}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (
        travels_in,
        configure,
        exchange,
        count,
        settle,
        reconfigure,
        knob,
        facts,
        shorten,
        block_import,
    )
}


_SAYING = threading.Lock()  # two threads answer


def say(name: str, found: dict[str, Any]) -> None:
    with _SAYING:
        print(json.dumps({"command": name, **found}), flush=True)


def main() -> None:
    torch.cuda.set_device(RANK)
    gc.disable()  # as torchtitan has it: what only a collection of garbage frees stays
    _store = TCPStore("127.0.0.1", PORT, is_master=False, wait_for_workers=False)
    state, commands = State(), queue.SimpleQueue[str]()

    def listen() -> None:
        for line in sys.stdin:
            if line.startswith("break_off"):
                say("break_off", break_off(state))
            else:
                commands.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    say("ready", {"pid": os.getpid()})
    while True:
        name, *arguments = json.loads(commands.get())
        say(name, COMMANDS[name](state, *arguments))


if __name__ == "__main__":
    main()
