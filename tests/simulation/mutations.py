# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
# lines of the engine are quoted as they are
"""Defects that the engine had, or could have, as changes of its source: the exploration must find each of them.

A mutation runs in a forked process, in which the engine is imported anew from the changed source.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import CodeType, ModuleType

SCHEDULES = 2000
"""Within so many a mutation must be found."""


@dataclass(frozen=True)
class Change:
    """`old` is in the source of `module`, as in "engine.heal", exactly once."""

    module: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """Return the module's full name."""
        return self.module if self.module.startswith("tests.") else f"titan_ft.{self.module}"


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: what goes wrong.
        kinds: of faults that find it soon.
        promises: of which it breaks one.
        first: seed to begin with.
        mode: of the schedules, as `schedule.draw` has it.
    """

    name: str
    changes: tuple[Change, ...]
    kinds: tuple[str, ...]
    promises: tuple[str, ...]
    first: int = 0
    mode: str = "sync"


@dataclass(frozen=True)
class Found:
    """The first schedule that a mutation breaks a promise in."""

    seed: int
    schedules: int
    promise: str
    text: str


def _one(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module, old, new),)


MUTATIONS = [
    Mutation(
        "a group that thaws is not told that the others have left its exchange",
        _one(
            "membership.pulse",
            "if slots := find_successors(own, known_members(members), status.quorum):",
            "if slots := []:",
        ),
        ("freeze",),
        ("liveness",),
    ),
    Mutation(
        "the wait for the first step is judged by each rank's own clock",
        (
            Change(
                "engine.step",
                "began, seen = self._group.clock(), -math.inf",
                "began, seen = time.monotonic(), -math.inf",
            ),
            Change(
                "engine.step",
                "            now = self._group.clock()\n            is_soon_over",
                "            now = time.monotonic()\n            is_soon_over",
            ),
        ),
        ("absent",),
        ("ranks never part",),
        first=160,
    ),
    Mutation(
        "a job is begun anew although a group in the midst of a long step lives",
        _one(
            "engine.step",
            "if is_soon_over and isinstance(outcome, Round) and self._look_for_outsiders(outcome):",
            "if False:",
        ),
        ("long",),
        ("no state given up",),
    ),
    Mutation(
        "a group that heals after the last step takes any state for the final one",
        _one(
            "engine.step",
            "return None\n            _end_if_decided(decision)",
            "self.heal()\n                return self.finish()\n            _end_if_decided(decision)",
        ),
        ("flip", "groups_die"),
        ("counters",),
        first=740,
    ),
    Mutation(
        "nobody tells of groups that cannot reach each other",
        _one(
            "membership.partition", "return known or failures >= _PROBE_AFTER or bool(self._accusers)", "return False"
        ),
        ("cut",),
        ("no state given up", "liveness"),
    ),
    Mutation(
        "a donor does not show its bytes",
        (
            Change(
                "engine.round",
                "        if joiners and self._position.standing.has_state:",
                "        if False and joiners:",
            ),
            Change(
                "protocol.decision",
                "donors=_send_to_donors(rows, free if verified else ()),",
                "donors=_send_to_donors(rows, free),",
            ),
            Change(
                "engine.heal",
                "        if attempt.digest is None or self._position.digest == attempt.digest:",
                "        if attempt.digest in (None, 0, self._position.digest):",
            ),
            Change("engine.heal", "agreed = verdict.verified and (verdict.step", "agreed = (verdict.step"),
            Change(
                "engine.heal",
                "if agreed and not (attempt.loaded and self._position.digest != verdict.digest):",
                "if agreed:",
            ),
        ),
        ("flip", "kill"),
        ("one trajectory", "no state given up"),
    ),
    Mutation(
        "a joiner rolls back before it has replayed what it has queued",
        _one(
            "protocol.position",
            "return self.target or (0 if self.corrupt else self.step)",
            "return 0 if self.corrupt else self.step",
        ),
        ("last",),
        ("no state given up",),
    ),
    Mutation(
        "one group ahead makes all others heal",
        (
            Change(
                "protocol.decision",
                "return most - 1 if rear > len(ahead) and Standing.FINISHED not in ahead else most",
                "return most",
            ),
            Change("engine.round", " + (1 if self._position.training else 0)", ""),
        ),
        ("tail",),
        ("no work lost",),
    ),
    Mutation(
        "a group that has read nothing does not count as one that holds the state",
        _one(
            "protocol.decision",
            "present = sum(made.rows[rank].training for rank in verdict.ready)",
            "present = len(verdict.contributors) + len(verdict.excluded)",
        ),
        ("lost",),
        ("liveness",),
    ),
    Mutation(
        "the digest of the state before is kept after an update",
        _one(
            "protocol.position",
            "self.step, self.lineage, self.digest, self.training = update.step, update.lineage, 0, True",
            "self.step, self.lineage, self.training = update.step, update.lineage, True",
        ),
        ("kill", "drain", "freeze"),
        ("no state given up", "one trajectory", "liveness"),
    ),
    Mutation(
        "a heal without a replayed update keeps the joiner's old digest",
        (
            Change(
                "protocol.position",
                "self.step, self.lineage, self.digest, self.corrupt = step, lineage, 0, False",
                "self.step, self.lineage, self.corrupt = step, lineage, False",
            ),
            Change(
                "engine.heal",
                "        self._rounds.take_digest()\n"
                "        if attempt.digest is None or self._position.digest == attempt.digest:",
                "        if True:",
            ),
        ),
        ("kill", "tail", "freeze"),
        ("no state given up",),
        first=400,
    ),
    Mutation(
        "a group that is behind adds its stale gradient",
        (
            Change(
                "engine.round", "not contribution.empty and not self._is_outdated(quorum)", "not contribution.empty"
            ),
            Change(
                "engine.round",
                "self._exchange.arm(lambda quorum: not self._is_outdated(quorum))",
                "self._exchange.arm(lambda quorum: True)",
            ),
            Change(
                "engine.round",
                "        facts = contribution if given or resting else NOTHING",
                "        facts = contribution if (given and claims) or resting else NOTHING",
            ),
        ),
        ("freeze", "cut_lighthouse"),
        ("exact average",),
    ),
    Mutation(
        "a stray's gradient enters the update",
        (
            Change(
                "protocol.decision",
                "    if verdict.strays:\n        return Repeat()",
                "    if False:\n        return Repeat()",
            ),
            Change(
                "protocol.decision", "spoiled_sum = verdict.tie or verdict.strays or", "spoiled_sum = verdict.tie or"
            ),
        ),
        ("flip", "freeze", "tail"),
        ("exact average", "one trajectory", "no work lost"),
    ),
    Mutation(
        "only the last bucket is looked at for a NaN",
        _one(
            "gradients.exchange",
            "[bucket.total for bucket in travelled]",
            "[bucket.total for bucket in travelled[-1:]]",
        ),
        ("nan",),
        ("exact average", "one trajectory"),
    ),
    Mutation(
        "what NCCL says only when it is asked is ignored",
        _one(
            "gradients.exchange",
            "if (error := self._membership.process_group.errored()) is not None:",
            "if (error := None) is not None:",
        ),
        ("kill",),
        ("exact average", "one trajectory", "no state given up"),
    ),
    Mutation(
        "the sums are not made a mean",
        _one("protocol.decision", "scale=nominal_tokens / self.verdict.valid_tokens,", "scale=1.0,"),
        ("none",),
        ("exact average",),
    ),
    Mutation(
        "two groups that have read the same data are both taken",
        _one(
            "protocol.decision",
            "doubled = _find_doubled(holders, read or [()] * len(rows))",
            "doubled = ()",
        ),
        ("many", "groups_die", "lighthouse", "cut_lighthouse"),
        ("every batch once", "no state given up"),
    ),
    Mutation(
        "a rank leaves when it was told to, not when all ranks of its group were",
        _one(
            "engine.drain",
            '            elif self._store.check([f"{self._key}/vote/{self._votes}"]):',
            "            elif self._requested:",
        ),
        ("engine.drain",),
        ("ranks never part", "no state given up", "liveness"),
    ),
    Mutation(
        "what a rank tells its group is sent before the vote, not there",
        _one("membership.group_store", "    store.check([key])", "    pass"),
        ("engine.drain",),
        ("ranks never part", "no state given up", "liveness"),
        first=4050,
    ),
    Mutation(
        "a joiner begins with the fetched state before all ranks of its group have it",
        _one(
            "engine.heal",
            "fetched = Fetched(min(self._group.gather(attempt.fetched())))",
            "fetched = attempt.fetched()",
        ),
        ("kill", "donor"),
        ("ranks never part", "one trajectory", "no state given up"),
    ),
    Mutation(
        "each rank lists the folder of checkpoints by itself",
        (
            Change(
                "training.checkpoint_choice",
                "if rank == 0 else Choice(NO_STEP)",
                "if True else Choice(NO_STEP)",
            ),
            Change(
                "training.checkpoint_choice",
                "step = gather(choice.step)[0]",
                "step = gather(choice.step)[rank]",
            ),
        ),
        ("checkpoint",),
        ("ranks never part", "no state given up", "liveness"),
    ),
    Mutation(
        "a group that is outside of the largest clique does not leave when it is told to",
        _one("membership.partition", "            if self._store.check([leave_key]):", "            if False:"),
        ("cut", "drain"),
        ("no work lost",),
    ),
    Mutation(
        "each rank leaves its gradients out, or not, for itself",
        _one(
            "engine.round",
            "spoiled=any(self._group.gather(int(self._exchange.spoiled)))",
            "spoiled=any([self._group.gather(int(self._exchange.spoiled)), self._exchange.spoiled][1:])",
        ),
        ("nan",),
        ("ranks never part",),
    ),
    Mutation(
        "rank 0 decides by what it has found itself",
        _one("membership.agreement", "decide(set(found).union(*said))", "decide(set(found))"),
        ("kill", "lossy"),
        ("ranks never part", "one trajectory", "exact average", "liveness", "no state given up"),
    ),
    Mutation(
        "each rank goes by its own vote",
        _one("membership.membership", '        return answer == "yes"\n', "        return ok\n"),
        ("kill", "lossy"),
        ("ranks never part",),
    ),
    Mutation(
        "a rank that loses its connection to the group's store ends",
        _one("membership.agreement", "                self._store = self._connect()\n", "                raise\n"),
        ("reset_own",),
        ("no state given up",),
    ),
    Mutation(
        "a corrupt minority ends all groups",
        _one(
            "protocol.decision",
            "    if outcome.verdict.tie:\n",
            "    if outcome.verdict.tie or outcome.verdict.corrupt:\n",
        ),
        ("flip",),
        ("no state given up",),
    ),
    Mutation(
        "the newest group says which shape is right",
        _one("protocol.member", "first = min(groups, key=", "first = max(groups, key="),
        ("protocol.shape",),
        ("no state given up",),
    ),
    Mutation(
        "a job begins with all of its groups only",
        _one(
            "protocol.decision",
            "    if present < config.min_replica_size and not begun:\n        return GiveUp(",
            "    if present < config.group_size:\n        return GiveUp(",
        ),
        ("late",),
        ("no state given up",),
    ),
    Mutation(
        "a count of givers that has broken is believed",
        _one("gradients.exchange", "(counted,) = self._read(gathered)", "counted = (self._await_works(), gathered)[1]"),
        ("kill", "freeze", "cut"),
        ("no idle traffic",),
    ),
    Mutation(
        "rounds without gradients send them nevertheless",
        _one("gradients.exchange", "if bucket.fragment not in self.travelling:", "if False:"),
        ("none",),
        ("no idle traffic",),
    ),
    Mutation(
        "a group of another shape is admitted",
        (
            Change(
                "protocol.member",
                "    return member.job, member.config, member.shape\n",
                "    return member.job, member.config, ''\n",
            ),
            Change("protocol.member", "    return shape_differences(", "    return [] and shape_differences("),
        ),
        ("protocol.shape",),
        ("one trajectory",),
    ),
    Mutation(
        "another host of a group than the first is not watched",
        _one("membership.rank_watch", "if seconds[rank] > self._patience]", "if False]"),
        ("freeze", "cut_ranks"),
        ("liveness",),
    ),
    Mutation(
        "a process that hangs ends without a word",
        _one("engine.watchdog", "self._explain, self._on_hang)", "self._explain)"),
        ("hang",),
        ("nothing silent",),
    ),
    Mutation(
        "the others wait for a joiner's transfer",
        _one("engine.heal", 'awaited=config.catch_up == "wait")', "awaited=True)"),
        ("rejoin",),
        ("no stall for a joiner",),
    ),
    Mutation(
        "a joiner replays all that it has queued at once",
        _one(
            "engine.heal",
            "if number >= 2 and (late := max(self._group.gather(self._note_lateness(until)))):",
            "if late := 0:",
        ),
        ("last",),
        ("no stall for a joiner",),
    ),
    Mutation(
        "a report names only who has accused this group since the one before",
        _one(
            "membership.partition",
            "lost.extend(member for member in self._members if member.has_reported(own))",
            "lost.extend(self._accusers)",
        ),
        ("fork",),
        ("liveness",),
    ),
    Mutation(
        "nobody looks at the base of the first update that is queued",
        _one(
            "engine.catch_up",
            "if base != (self.updates[place - 1].lineage if place else self.lineage):",
            "if place and base != self.updates[place - 1].lineage:",
        ),
        ("fork",),
        ("one trajectory",),
    ),
    Mutation(
        "a checkpoint that was withdrawn counts as saved",
        (
            Change("protocol.position", "            self.saved = min(self.saved, self.agreed)\n", ""),
            Change(
                "protocol.position",
                "self.saved, self.saved_corrupt = min(self.saved, self.agreed), False",
                "self.saved_corrupt = False",
            ),
        ),
        ("save",),
        ("no work lost",),
    ),
    Mutation(
        "the state that came is not compared with the digest that was agreed on",
        _one(
            "engine.heal",
            "        if attempt.digest is None or self._position.digest == attempt.digest:",
            "        if True:",
        ),
        ("flip", "kill"),
        ("one trajectory",),
    ),
    Mutation(
        "nobody meets the others right behind a round's update",
        _one("engine.step", "        for _ in range(_MAX_OPENINGS):", "        for _ in ():"),
        ("joiner",),
        ("no stall for a joiner", "no work lost", "liveness"),
        mode="semi",
    ),
    Mutation(
        "a joiner lets the others wait until it has trained a whole round",
        _one("engine.round", "(Sign.AWAITED, self.awaited), ", ""),
        ("alone",),
        ("no stall for a joiner", "liveness"),
        mode="semi",
    ),
    Mutation(
        "a joiner sits in the next round although its state is there long before",
        _one("engine.heal", "attempt is not None and meets_later and not self.ended_on_update:", "False:"),
        ("joiner",),
        ("no stall for a joiner",),
        mode="semi",
    ),
    Mutation(
        "groups in the midst of a round are not waited for when the lighthouse was started again",
        _one(
            "membership.membership",
            '        return self._agreement.rank0_decides((), decide) == "live"',
            "        return False",
        ),
        ("lighthouse", "leave", "alone"),
        ("no work lost",),
        mode="semi",
    ),
    Mutation(
        "the bytes that a round's changes are measured from are not compared behind its steps",
        _one(
            "engine.round",
            "        return bool(config.semi_sync_method and config.digest_every and at_end)",
            "        return False",
        ),
        ("flip",),
        ("one trajectory",),
        mode="semi",
    ),
    Mutation(
        "moments of its own are in a group's digest",
        _one("engine.outer", "        return [self._outer.optimizer]", "        return self._optimizers"),
        ("none",),
        ("one trajectory", "no state given up"),
        mode="semi",
    ),
    Mutation(
        "a group's change is not weighted by its tokens",
        _one("engine.outer", "out=change).mul_(weights[fragment])", "out=change).mul_(1 / 3)"),
        ("none",),
        ("exact average",),
        mode="semi",
    ),
    Mutation(
        "a fragment's mean is by the number of groups",
        _one("gradients.bucket", "0.0 if shard is None else weight", "float(shard is not None)"),
        ("none",),
        ("exact average",),
        mode="semi",
    ),
    Mutation(
        "fragments that are not exchanged are updated by what their buckets hold",
        _one(
            "gradients.exchange",
            "if flat is None or weights is None:",
            "weights = weights or [1.0] * len(bucket.parts)\n            if flat is None:",
        ),
        ("none",),
        ("exact average",),
        mode="semi",
    ),
    Mutation(
        "a group goes on with the anchors of all fragments",
        _one(
            "engine.outer",
            "            if anchor.grad is not None:\n                weights = ",
            "            if True:\n                weights = ",
        ),
        ("none",),
        ("one trajectory",),
        mode="semi",
    ),
    Mutation(
        "a group whose change was not finite goes on with its moments",
        _one(
            "tests.simulation.semi_sync",
            "        if self.position.exclusions:\n",
            "        if False:\n",
        ),
        ("nan",),
        ("no state given up",),
        mode="semi",
    ),
    Mutation(
        "what others send in bfloat16 is not heard",
        _one(
            "gradients.exchange",
            "bucket.values.copy_(parts.view(-1)[: bucket.values.numel()])",
            "bucket.values.mul_(num_members)",
        ),
        ("none",),
        ("exact average", "one trajectory"),
    ),
    Mutation(
        "each adds up the changes in 8 bits in an order of its own",
        _one(
            "gradients.exchange",
            "add_up(self._all_gather(payload), num_exact, bucket.flat)",
            "add_up(self._all_gather(payload).roll(-self._quorum.rank, 0), num_exact, bucket.flat)",
        ),
        ("none",),
        ("one trajectory",),
        mode="semi",
    ),
    Mutation(
        "what rounding has left of a change is given several times",
        _one("gradients.quantize", "            values += self._kept", "            values += self._kept.mul_(4)"),
        ("none",),
        ("exact average",),
        mode="semi",
    ),
    Mutation(
        "an entry has the loader's state before its batches",
        _one(
            "engine.feed",
            "            batches = [next(self._batches) for _ in range(num_batches)]\n"
            "            entry = Entry(self._slot, self._next_batch, num_batches, save_loader(self.loader))",
            "            entry = Entry(self._slot, self._next_batch, num_batches, save_loader(self.loader))\n"
            "            batches = [next(self._batches) for _ in range(num_batches)]",
        ),
        ("kill", "many"),
        ("every batch once",),
    ),
    Mutation(
        "a group that opens its data elsewhere says that they go on",
        _one("engine.feed", "exact = reading.first == expected", "exact = True"),
        ("kill", "many"),
        ("nothing silent",),
    ),
    Mutation(
        "a group that has loaded a checkpoint counts as one that keeps the state",
        _one(
            "protocol.position",
            "tuple(rows[rank].slot for rank in verdict.holders if rows[rank].training)",
            "tuple(made.slots(verdict.holders))",
        ),
        ("preempt",),
        ("no work lost",),
    ),
]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports changed modules from their changed source."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to import a changed module."""
        if not any(name == change.name for change in self._changes):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=_Loader(name, str(found.origin), self._changes)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = [change for change in changes if name == change.name]

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source; nothing is kept."""
        text = changed(self.get_data(self.path).decode(), self._changes)
        return self.source_to_code(text.encode(), self.path)


def changed(source: str, changes: Sequence[Change]) -> str:
    """Return a source with changes made.

    Raises:
        ValueError: what a change is about is not there exactly once: the engine has moved on.
    """
    for change in changes:
        if source.count(change.old) != 1:
            raise ValueError(
                f"tests/simulation/mutations.py: {change.module}.py must have this exactly once, has it "
                f"{source.count(change.old)} times; write the mutation anew: {change.old}"
            )
        source = source.replace(change.old, change.new)
    return source


def find(mutation: Mutation, schedules: int = SCHEDULES) -> Found | str:
    """Explore with a mutation; returns what was found, or why nothing was."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_find, args=(mutation, schedules, send))
    process.start()
    send.close()
    try:
        found = receive.recv()
    except EOFError:
        found = "the process ended without an answer"
    process.join()
    return found if isinstance(found, str) else Found(*found)


def _find(mutation: Mutation, schedules: int, send: Connection) -> None:
    from tests.simulation.standins import PACKAGES

    anew = (*PACKAGES, "tests.simulation")
    for name in [name for name in sys.modules if name.startswith(anew)]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutation.changes))
    try:
        from tests.simulation import standins
        from tests.simulation.schedule import draw

        with standins.installed():
            for number in range(schedules):
                seed = mutation.first + number
                for problem in draw(seed, mutation.kinds, mutation.mode).run().problems[:1]:
                    if problem.promise in mutation.promises:
                        send.send(
                            (seed, number + 1, problem.promise, problem.text)
                        )  # plain: this module is another one
                        return
        send.send(f"nothing in {schedules} schedules")
    except Exception as error:  # noqa: BLE001  # a process's edge
        send.send(f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str]) -> int:
    """Show in which schedule each mutation is found; 1 if one is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations")
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    parser.add_argument("--only", default="", help="part of the name")
    options = parser.parse_args(arguments)
    missed = 0
    for mutation in MUTATIONS:
        if options.only in mutation.name:
            found = find(mutation, options.schedules)
            missed += isinstance(found, str)
            said = found if isinstance(found, str) else f"seed {found.seed}, {found.promise}: {found.text[:110]}"
            print(f"{mutation.name}: {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    from titan_ft import device

    device.prepare()
    import tests.simulation.standins  # noqa: F401  # torch and torchft are imported once, before the forks

    sys.exit(main(sys.argv[1:]))
