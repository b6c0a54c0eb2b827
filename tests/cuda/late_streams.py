# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the scenarios on late streams with some of the engine's waits removed; print which removals
are noticed.

    bash tests/cuda_stand_in/run.sh -m tests.cuda.late_streams            # every wait: a table
    bash tests/cuda_stand_in/run.sh -m tests.cuda.late_streams NAME...    # these waits

Each case is a fork of this process, which has imported torch and torchtitan, but not titan_ft. So a
case takes about a second, and may import a titan_ft without some waits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PUNCTUAL: tuple[str, ...] = ()
LATE = tuple(f"FAKE_CUDA_LATE={seed}:20:10:50" for seed in (1, 2))
LAZY = ("FAKE_CUDA_LAZY=300", "FAKE_CUDA_LAZY=300:1:30", "FAKE_CUDA_LAZY=300:2:60")
"""Streams of which all works, or two thirds, or a third, begin only when somebody waits for
them.
"""
CASE_SECONDS = 40.0  # only ever reached by a bug, or by a wait that is missed so


BOTH = ("gloo", "nccl")
SCENARIOS = {
    "train": BOTH,
    "train_without_overlap": BOTH,
    "train_on_two_streams": BOTH,
    "train_over_broken_exchanges": BOTH,
    "train_in_8_bits": BOTH,
    "train_in_bfloat16": ("gloo",),
    "train_a_bfloat16_model": BOTH,
    "heal": BOTH,
    "heal_with_room": ("nccl",),
    "queue_beside_the_next": ("nccl",),
    "fill_beside_the_last": ("nccl",),
    "copy": BOTH,
    "copy_beside_training": BOTH,
    "copy_on_another_thread": BOTH,
    "copy_over_a_copy": ("gloo",),
    "copy_a_state_that_ends": ("gloo",),
    "copy_parts": ("gloo",),
    "load_on_another_device": ("gloo",),
    "serve": ("gloo",),
    "rounds": BOTH,
    "rounds_in_bfloat16": ("gloo",),
    "rounds_mixed": ("gloo",),
    "restore": ("gloo",),
    "read_a_number": ("gloo",),
    "pin_again": ("gloo",),
    "replay": ("gloo",),
    "backward_waits_for_no_gradient": BOTH,
    "backward_waits_for_no_gradient_in_bfloat16": ("gloo",),
    "training_waits_for_no_member": ("nccl",),
    "load_waits_for_no_member": ("nccl",),
    "host_waits_for_no_copy": ("gloo",),
    "newcomers_copy_waits_for_no_backward": ("gloo",),
}
"""The functions of `stream_scenarios`, and the backends that each runs with."""
CASES = [(scenario, backend) for scenario, backends in SCENARIOS.items() for backend in backends]

NOTICED_BY: dict[str, tuple[str, str]] = {
    "device.synchronize:synchronize": ("read_a_number", "gloo"),
    "device.synchronize:synchronize#2": ("rounds", "gloo"),
    "device.read_later:record_event": ("read_a_number", "gloo"),
    "device.read_later.read:synchronize": ("read_a_number", "gloo"),
    "device.wait_for:synchronize": ("train", "gloo"),
    "device.wait_for:wait_event": ("copy", "gloo"),
    "device.join_stream:wait_stream": ("train_on_two_streams", "nccl"),
    "pinned.PinnedMemory._serve:synchronize": ("pin_again", "gloo"),
    "membership.collectives.all_to_all:wait": ("train", "gloo"),
    "membership.collectives.all_gather:wait": ("train_in_8_bits", "nccl"),
    "gradients.sums.Sums.copy:record_event": ("queue_beside_the_next", "nccl"),
    "gradients.sums.Sums.write:synchronize": ("rounds", "nccl"),
    "gradients.sums.Sums.write:synchronize#2": ("rounds", "nccl"),
    "gradients.sums.Sums.write:record_event": ("train", "gloo"),
    "gradients.exchange.GradientExchange._make_hook.copy_gradient:join_stream": (
        "train_on_two_streams",
        "nccl",
    ),
    "gradients.sums.Sums.await_last_read:wait_for": ("train_on_two_streams", "gloo"),
    "gradients.exchange.GradientExchange._fill:record_event": ("train", "gloo"),
    "gradients.flight.Flight._sum_and_gather:wait_for": ("train", "gloo"),
    "gradients.operations.Operations.await_works:wait": ("train", "nccl"),
    "engine.outer.OuterModel.adopt_model:synchronize": ("restore", "gloo"),
    "engine.outer.OuterModel.restore_model:synchronize": ("restore", "gloo"),
    "engine.outer.OuterModel.compute_changes:synchronize": ("rounds", "gloo"),
    "engine.outer.OuterModel.step:synchronize": ("rounds", "gloo"),
    "membership.process_group.AbortableNccl._connect:wait": ("train", "nccl"),
    "transfer.snapshot.Snapshot.wait:synchronize": ("copy", "gloo"),
    "transfer.snapshot.TrainState.__init__:_await_running_copy": ("copy_beside_training", "gloo"),
    "transfer.snapshot.TrainState._find_current:record_event": ("copy_on_another_thread", "gloo"),
    "transfer.snapshot.TrainState._copy:record_event": ("copy", "gloo"),
    "transfer.snapshot.TrainState._copy:wait_for": ("copy", "gloo"),
    "transfer.snapshot.TrainState._copy:record_event#2": ("copy", "gloo"),
    "transfer.snapshot.TrainState._await_running_copy:wait_for": ("copy_beside_training", "gloo"),
    "transfer.snapshot.TrainState.reuse_memory:wait": ("copy_over_a_copy", "gloo"),
    "transfer.snapshot.TrainState.load:wait": ("load_on_another_device", "gloo"),
    "transfer.snapshot.TrainState.load:_await_running_copy": ("copy_beside_training", "gloo"),
    "transfer.snapshot.TrainState.load:synchronize": ("heal", "nccl"),
    "transfer.snapshot.TrainState.load:record_event": ("heal", "nccl"),
    "transfer.state_server.StateServer._serve_state:wait": ("serve", "gloo"),
    "engine.strategy.StepStrategy.replay:synchronize": ("replay", "gloo"),
    "engine.strategy.StepStrategy.replay:record_event": ("replay", "gloo"),
}
"""The scenario and backend that notice the removal of a wait."""
COVERED_BY: dict[str, tuple[str, str, str]] = {}
"""Of a wait whose removal nothing notices: the wait that covers it, and the case that notices both
removals.
"""


@dataclass(frozen=True)
class Case:
    """A scenario, the lateness of its streams, and the removed waits of its titan_ft."""

    scenario: str
    backend: str
    lateness: tuple[str, ...] = PUNCTUAL
    removed: frozenset[str] = frozenset()

    @property
    def reference(self) -> Case:
        """Return the undisturbed case with the expected result."""
        return Case(self.scenario, self.backend)

    def as_json(self) -> list[Any]:
        """Return the input of `from_json`."""
        return [self.scenario, self.backend, list(self.lateness), sorted(self.removed)]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Case:
        """Return a case from `as_json`."""
        scenario, backend, lateness, removed = fields
        return Case(scenario, backend, tuple(lateness), frozenset(removed))

    def __str__(self) -> str:
        return f"{self.scenario} over {self.backend}"


@dataclass
class Result:
    """The digest of a case, or its error."""

    digest: str
    error: str = ""
    seconds: float = 0.0


@dataclass
class _Child:
    case: Case
    pid: int
    pipe: int
    began: float
    received: bytes = b""


class Runner:
    """Runs cases, a few at a time, and keeps their results.

    Args:
        at_once: number of cases that run at the same time.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._results: dict[Case, Result] = {}

    def run(self, cases: Iterable[Case]) -> dict[Case, Result]:
        """Return the results of some cases."""
        wanted = list(dict.fromkeys(cases))
        waiting = [case for case in wanted if case not in self._results]
        children: list[_Child] = []
        while waiting or children:
            while waiting and len(children) < self._at_once:
                children.append(_fork(waiting.pop(0)))
            readable, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
            for child in list(children):
                if child.pipe in readable:
                    part = os.read(child.pipe, 1 << 16)
                    child.received += part
                else:
                    part = b"nothing to read"
                is_late = time.monotonic() - child.began > CASE_SECONDS
                if is_late:
                    os.kill(child.pid, signal.SIGKILL)
                if is_late or not part:
                    children.remove(child)
                    self._results[child.case] = _end(child, is_late)
        return {case: self._results[case] for case in wanted}

    def notices(self, case: Case) -> bool:
        """True if a case ends otherwise than the undisturbed one.

        Raises:
            RuntimeError: the undisturbed one fails.
        """
        results = self.run([case.reference, case])
        if results[case.reference].error:
            raise RuntimeError(
                f"{case.reference} fails undisturbed: {results[case.reference].error}"
            )
        return results[case].digest != results[case.reference].digest


def _fork(case: Case) -> _Child:
    reads, writes = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writes)
        return _Child(case, pid, reads, time.monotonic())
    status = 1
    try:
        os.close(reads)
        if not os.environ.get("LATE_STREAMS_OUTPUT"):
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
        result = _run_here(case)
        os.write(writes, json.dumps(dataclasses.asdict(result)).encode())
        status = 0
    finally:
        os._exit(status)  # no clean-up: threads of a case that went wrong may never end


def _end(child: _Child, is_late: bool) -> Result:
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    seconds = time.monotonic() - child.began
    if is_late:
        return Result("", f"no end after {CASE_SECONDS:g} s", seconds)
    with contextlib.suppress(ValueError):
        return dataclasses.replace(Result(**json.loads(child.received)), seconds=seconds)
    return Result("", f"exit status {os.waitstatus_to_exitcode(status)}", seconds)


def _run_here(case: Case) -> Result:
    """Run a case in this process, which has not imported titan_ft yet."""
    from tests.cuda.waits import remove_waits

    faulthandler.dump_traceback_later(0.8 * CASE_SECONDS)
    os.environ.update(setting.split("=", 1) for setting in case.lateness)
    remove_waits(case.removed)
    try:
        from tests.cuda import stream_scenarios
        from titan_ft import device

        os.environ.update(device.nccl_environment(os.environ, timeout_ms=10_000))
        found = getattr(stream_scenarios, case.scenario)(stream_scenarios.World(case.backend))
        if path := os.environ.get("LATE_STREAMS_SAVE"):  # to look at
            import torch

            torch.save(found, path)
        return Result(_digest(found))
    except Exception as error:  # noqa: BLE001  # garbage that was read too early may raise anything
        traceback.print_exc()
        return Result("", f"{type(error).__name__}: {str(error)[:500]}")


def _digest(found: Any) -> str:
    """Hash tensors and texts in nested lists."""
    digest = hashlib.sha256()
    for leaf in _leaves(found):
        if isinstance(leaf, str):
            digest.update(leaf.encode())
        else:
            digest.update(
                bytes(leaf.contiguous().view(-1).view(leaf.new_empty(0).byte().dtype).tolist())
            )
    return digest.hexdigest()


def _leaves(found: Any) -> Iterator[Any]:
    if isinstance(found, list):
        for each in found:
            yield from _leaves(each)
    else:
        yield found


def preload() -> None:
    """Import all that takes long, but nothing of titan_ft: no CUDA call is made before the fork."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("RUST_LOG", "error")
    import torch
    import torch._inductor
    import torchft  # noqa: F401
    import torchtitan.components.lr_scheduler
    import torchtitan.components.optimizer  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.partition(".")[0] == "titan_ft" for name in sys.modules), (
        "titan_ft is imported already"
    )


def removals_of(wait: str) -> list[tuple[Case, bool]]:
    """Return cases in which a wait is removed, and whether each of them must notice it."""
    if wait in NOTICED_BY:
        return [(Case(*NOTICED_BY[wait], LAZY[:1], frozenset((wait,))), True)]
    cover, *case = COVERED_BY[wait]
    removals = [((wait,), False), ((cover,), False), ((wait, cover), True)]
    return [(Case(*case, LAZY[:1], frozenset(removed)), noticed) for removed, noticed in removals]


def describe(wait: str) -> str:
    """Describe the cases that notice the removal of a wait."""
    if wait in NOTICED_BY:
        return "`{}` over {}".format(*NOTICED_BY[wait])
    return "nothing; with `{}` removed too, `{}` over {}".format(*COVERED_BY[wait])


def find_cover(runner: Runner, wait: str) -> tuple[str, str, str] | None:
    """Return a wait that covers another one, and the scenario and backend that show it.

    The scenario notices neither removal alone, and both together.
    """
    from tests.cuda.waits import find_waits

    for scenario, backend in CASES:
        for other in find_waits():
            if other == wait:
                continue
            pair = Case(scenario, backend, LAZY[:1], frozenset((wait, other)))
            alone = Case(scenario, backend, LAZY[:1], frozenset((other,)))
            if runner.notices(pair) and not runner.notices(alone):
                return other, scenario, backend
    return None


def main(arguments: Sequence[str]) -> int:
    """Print the table of waits; 1 if a removal is not noticed as it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "wait", nargs="*", help="look for all cases that notice the removal of this wait"
    )
    parser.add_argument(
        "--run", action="store_true", help="read cases as JSON, and print their results as JSON"
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="cases that run at the same time (2)"
    )
    options = parser.parse_args(arguments)
    preload()
    runner = Runner(options.at_once)
    if options.run:
        cases = [Case.from_json(fields) for fields in json.load(sys.stdin)]
        results = runner.run(cases)
        print(json.dumps([dataclasses.asdict(results[case]) for case in cases]))
        return 0
    if options.wait:
        for wait in options.wait:
            cases = [Case(*case, LAZY[:1], frozenset((wait,))) for case in CASES]
            runner.run([*cases, *(case.reference for case in cases)])
            noticing = [case for case in cases if runner.notices(case)]
            print(
                f"{wait}: {', '.join(map(str, noticing)) or find_cover(runner, wait)}", flush=True
            )
        return 0
    missing = 0
    print("| wait | its removal is noticed by |\n| --- | --- |")
    for wait in sorted({*NOTICED_BY, *COVERED_BY}):
        removals = removals_of(wait)
        runner.run([each for case, _ in removals for each in (case, case.reference)])
        is_right = all(runner.notices(case) == expected for case, expected in removals)
        missing += not is_right
        print(f"| `{wait}` | {describe(wait)}{'' if is_right else ' (NOT SO)'} |", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
