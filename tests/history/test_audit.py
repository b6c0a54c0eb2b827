# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The audit of a run's batches: none lost, none repeated, or unknown."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import change, named, untyped
from tests.event_builder import event as make
from titan_ft.cli.main import main
from titan_ft.history.batches import audit as audits
from titan_ft.history.batches.audit import Audit
from titan_ft.history.check import MAX_SHOWN, check, make_check_table
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.record.trajectory import ROOT
from titan_ft.history.terminal import text_of
from titan_ft.run.events import ChangedField, Event


def audit(events: Iterable[Event]) -> Audit:
    return audits.audit(RunRecord(events))


def format_audit(found: Audit) -> str:
    """Format the findings as lines, as `check` does."""
    findings = [*found.lost, *found.repeated, *found.differing, *found.void, *found.partial]
    lines = [
        *(str(finding) for finding in findings),
        *found.conflicts,
        *found.unknown,
        *found.notes,
    ]
    return "\n".join([found.verdict, found.counts(), *lines])


class Job:
    """Writes the history of a job of groups of two ranks, each of which trains two batches of its
    slot a step.
    """

    def __init__(self, num_groups: int = 2) -> None:
        self.events: list[Event] = []
        self.time = 0.0
        self.state = ROOT
        self.step = 0
        self.ends = dict.fromkeys(range(num_groups), 0)
        self._names = 0
        self._read: dict[tuple[Any, ...], int] = {}  # process, slot -> end of what it has read
        self._saved: dict[str, tuple[int, dict[int, int]]] = {}
        self._remember()
        self.say("loader_checked", exact=True, transparent=True)

    def _remember(self) -> None:
        self._saved[self.state] = (self.step, dict(self.ends))

    def go_back(self, state: str) -> None:
        """Continue from an earlier state, with its ledger."""
        self.state = state
        self.step, ends = self._saved[state]
        self.ends = dict(ends)

    def say(self, event: str, **fields: Any) -> None:
        self.time += 0.1
        usual = {
            name: self.state for name in ("lineage",) if name in named(event).__struct_fields__
        }
        self.events.append(make(event, time=self.time, **usual | fields))

    def commit(
        self,
        groups: Iterable[int],
        by: Iterable[int] | None = None,
        reads: Mapping[int, list[int]] | None = None,
        first: Mapping[int, int] | None = None,
        **fields: Any,
    ) -> str:
        """Make a step of the groups; return the state's name.

        Args:
            by: the groups that live to report it; all by default.
            reads: the slots that each group reads; its own by default.
            first: first batch by slot, if it is not the ledger's.
            fields: override those of the events.
        """
        groups = list(groups)
        reads = reads or {group: [group] for group in groups}
        self.step, self._names = self.step + 1, self._names + 1
        parent, self.state = self.state, f"{self._names:012x}"
        starts = {
            slot: (first or {}).get(slot, self.ends[slot])
            for slots in reads.values()
            for slot in slots
        }
        for group in groups if by is None else by:
            for rank in range(2):
                data = {slot: reading(slot, starts[slot], rank) for slot in reads.get(group, [])}
                self._open(
                    data.values(), (group, rank, fields.get("attempt", 0), fields.get("pid", 1))
                )
                usual = {
                    "participants": groups,
                    "lineage": self.state,
                    "parent": parent,
                    "batches": {str(slot): [start, 2] for slot, start in starts.items()},
                    "data": data.pop(group, None),
                    "extra_data": list(data.values()),
                }
                self.say(
                    "step_committed",
                    replica=group,
                    rank=rank,
                    attempt=0,
                    step=self.step,
                    **(usual | fields),
                )
        self.ends |= {slot: start + 2 for slot, start in starts.items()}
        self._remember()
        return self.state

    def _open(self, data: Iterable[dict[str, Any]], process: tuple[int, int, int, int]) -> None:
        """Write an event of each slot that a process opens, which says that it continued
        exactly.
        """
        names = ("replica", "rank", "attempt", "pid")
        for read in data:
            slot, first = read["slot"], read["first_batch"]
            if first > self._read.get((process, slot), 0):
                who = dict(zip(names, process, strict=True))
                self.say("data_opened", slot=slot, first_batch=first, exact=True, **who)
            self._read[process, slot] = first + read["num_batches"]


def reading(slot: int, first_batch: int, rank: int) -> dict[str, Any]:
    checksum = f"{slot}{rank}{first_batch:06x}"
    return {"slot": slot, "first_batch": first_batch, "num_batches": 2, "checksum": checksum}


def brief(found: Audit) -> tuple[str, int, int, int, int]:
    """Return the verdict, and the numbers of batches trained, lost, repeated and void."""
    return found.verdict, found.num_batches, found.num_lost, found.num_repeated, found.num_void


def clean_job(num_steps: int = 5) -> Job:
    job = Job()
    for _ in range(num_steps):
        job.commit([0, 1])
    return job


def test_clean_run_holds() -> None:
    """Each batch of an undisturbed run was trained once, in whatever order its events are read."""
    job = clean_job()
    found = audit(job.events)
    assert brief(found) == ("holds", 20, 0, 0, 0)
    assert (found.num_steps, found.unknown, found.notes) == (5, [], [])
    random.Random(0).shuffle(job.events)
    assert audit(job.events) == found


def test_killed_group_resumes_its_slot() -> None:
    """An absent group trains and loses nothing: its slot continues where it was."""
    job = clean_job(2)
    for groups in ([0], [0], [0, 1], [0, 1]):
        job.commit(groups)
    assert brief(audit(job.events)) == ("holds", 2 * 4 + 2 + 2 + 2 * 4, 0, 0, 0)


def test_void_step_is_no_repeat() -> None:
    """A step that only some groups committed, and the others repeated, is void; its batches are
    used again.
    """
    job = clean_job(3)
    before = job.state
    job.commit([0, 1, 2], by=[0], reads={0: [0], 1: [1], 2: []})
    job.go_back(before)
    job.commit([1])
    job.commit([0, 1])
    found = audit(job.events)
    assert brief(found) == ("holds", 12 + 2 + 4, 0, 0, 4)
    assert {(f.slot, f.first_batch, f.num_batches, f.steps) for f in found.void} == {
        (0, 6, 2, (4,)),
        (1, 6, 2, (4,)),
    }


def test_lost_batches_are_named() -> None:
    """A gap in a slot's batches is lost data, named with the steps around it."""
    job = clean_job(2)
    job.commit([0, 1], first={1: 7})
    found = audit(job.events)
    assert brief(found) == ("does not hold", 12, 3, 0, 0)
    (lost,) = found.lost
    assert (lost.slot, lost.first_batch, lost.num_batches, lost.steps) == (1, 4, 3, (2, 3))
    assert "slot 1, batches 4-6: lost between steps 2 and 3" in format_audit(found)


def test_batches_lost_at_the_start() -> None:
    """A slot whose first batch is not 0 lost the earlier ones."""
    job = Job()
    job.commit([0, 1], first={0: 2})
    (lost,) = audit(job.events).lost
    assert (lost.slot, lost.first_batch, lost.num_batches, lost.steps) == (0, 0, 2, (0, 1))


def test_repeated_batches_are_named() -> None:
    """Batches trained in two steps of the trajectory are repeats, named with both steps and counted
    once.
    """
    job = clean_job(3)
    job.commit([0, 1], first={1: 4})
    found = audit(job.events)
    assert brief(found) == ("does not hold", 14, 0, 2, 0)
    (repeated,) = found.repeated
    assert (repeated.slot, repeated.first_batch, repeated.num_batches, repeated.steps) == (
        1,
        4,
        2,
        (3, 4),
    )
    assert "slot 1, batches 4-5: trained at step 3 and again at step 4" in format_audit(found)
    job.commit([0, 1], first={1: 3})
    job.commit([0, 1], first={1: 3})
    found = audit(job.events)
    assert found.num_repeated == 3
    assert found.counts() == "15 trained once, 0 lost, 3 repeated, 0 void"


def test_batches_out_of_order_do_not_hold() -> None:
    """Batches of a slot in another order are neither lost nor repeated, but misplaced."""
    job = clean_job(1)
    job.commit([0, 1], first={1: 4})
    job.commit([0, 1], first={1: 2})
    found = audit(job.events)
    assert brief(found) == ("does not hold", 12, 0, 0, 0)
    assert "slot 1: the batches were not trained in their order" in format_audit(found)


def test_batch_that_differs_when_read_again() -> None:
    """A batch read with different tokens in a void step and its repetition was not resumed
    correctly.
    """
    job = clean_job(2)
    before = job.state
    job.commit([0, 1], by=[0])
    job.go_back(before)
    job.commit([0, 1])
    assert audit(job.events).verdict == "holds"
    wrong = next(event for event in job.events[-4:] if (event.replica, event.rank) == (0, 1))
    wrong.data.checksum = "deadbeef"
    found = audit(job.events)
    assert brief(found) == ("does not hold", 12, 0, 0, 4)
    (differing,) = found.differing
    assert (differing.slot, differing.first_batch, differing.num_batches) == (0, 4, 2)
    assert "rank 1" in differing.detail
    assert "deadbeef" in differing.detail
    assert "whether any were lost or repeated is not known" in found.counts()


@pytest.mark.parametrize("step", [1, 3])
def test_cut_history_is_unknown(step: int) -> None:
    """Without the events of one step the verdict is unknown, and names the place of the cut."""
    job = clean_job(5)
    found = audit(event for event in job.events if getattr(event, "step", 0) != step)
    assert (found.verdict, found.num_steps, found.lost, found.repeated) == (
        "unknown",
        5 - step,
        [],
        [],
    )
    assert f"before step {step + 1} ({step:012x})" in "".join(found.unknown)
    assert found.void == []


def test_what_is_known_to_be_lost_beats_unknown() -> None:
    """A cut history with batches lost after the cut does not hold."""
    job = clean_job(4)
    job.commit([0, 1], first={0: 10})
    found = audit(event for event in job.events if getattr(event, "step", 0) != 2)
    assert (found.verdict, found.num_lost) == ("does not hold", 2)
    assert found.unknown


@pytest.mark.parametrize("events", [[], [make("worker_started", time=1.0)]])
def test_history_that_tells_nothing_is_unknown(events: list[Event]) -> None:
    """An empty history, or one without any commit, is unknown and says why."""
    found = audit(events)
    assert brief(found) == ("unknown", 0, 0, 0, 0)
    assert found.unknown
    json.dumps(found.to_dict())


@pytest.mark.parametrize("missing", ["lineage", "parent", "batches"])
def test_commit_that_lacks_a_field_is_named(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A commit without its state or batches makes the verdict unknown, and is named."""
    lines = [untyped(event) for event in clean_job().events]
    del lines[7][missing]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "unknown" in out
    assert "a.jsonl:8" in out
    assert f"`{missing}`" in out


def test_step_without_batches_is_unknown() -> None:
    """A history whose only step trained no batches never holds."""
    job = Job()
    job.commit([0], batches={}, data=None)
    assert audit(job.events).verdict == "unknown"


def test_resume_from_a_checkpoint() -> None:
    """After a total loss the steps after the checkpoint are void, even while fewer new ones
    exist.
    """
    job = clean_job(3)
    saved = job.state
    for _ in range(5):
        job.commit([0, 1])
    job.go_back(saved)
    for replica in range(2):
        job.say("checkpoint_loaded", replica=replica, step=3, lineage=saved)
    job.commit([0, 1])
    found = audit(job.events)
    assert brief(found) == ("holds", 16, 0, 0, 20)
    assert (found.num_steps, found.notes) == (4, [])


def test_wrong_resume_from_a_checkpoint() -> None:
    """A resume that skips data of the checkpoint lost it, although the void steps had
    trained it.
    """
    job = clean_job(3)
    saved = job.state
    for _ in range(5):
        job.commit([0, 1])
    job.go_back(saved)
    job.say("checkpoint_loaded", replica=0, step=3, lineage=saved)
    job.commit([0, 1], first={1: 16})
    found = audit(job.events)
    assert (found.verdict, found.num_lost) == ("does not hold", 10)


def test_checkpoint_loaded_by_a_group_that_then_heals() -> None:
    """A restarted group that loads a checkpoint and then heals does not take the job back."""
    job = clean_job(3)
    saved = job.state
    for _ in range(3):
        job.commit([0])
    job.say("checkpoint_loaded", replica=1, step=3, lineage=saved)
    assert (audit(job.events).verdict, audit(job.events).num_steps) == ("holds", 6)


def test_training_that_starts_anew() -> None:
    """After a total loss without a checkpoint the first steps are made again, and only those
    count.
    """
    job = clean_job(5)
    job.go_back(ROOT)
    job.say("started_anew", replica=0, step=0)
    job.commit([0, 1])
    assert brief(audit(job.events)) == ("holds", 4, 0, 0, 20)


def test_unannounced_return_is_told() -> None:
    """An unannounced return to fewer steps leaves the final state open; trouble in one branch only
    is unknown.
    """
    job = clean_job(5)
    job.go_back(ROOT)
    job.commit([0, 1])
    found = audit(job.events)
    assert found.verdict == "holds"
    assert "ended with one of" in found.notes[0]
    job.commit([0, 1], first={0: 4})
    assert audit(job.events).verdict == "unknown"


@pytest.mark.parametrize(
    ("restart", "fields"),
    [
        ("checkpoint_loaded", {"step": 0, "lineage": f"{3:012x}"}),
        ("rolled_back", {"step": 3}),
    ],
)
def test_return_to_another_state_than_announced(restart: str, fields: dict[str, Any]) -> None:
    """A job that continues from another state than announced leaves the final state open."""
    job = clean_job(5)
    job.go_back(ROOT)
    job.say(restart, **fields)
    job.commit([0, 1])
    assert "ended with one of" in "".join(audit(job.events).notes)


def test_return_announced_too_late() -> None:
    """An announced restart does not explain earlier steps."""
    job = clean_job(5)
    job.go_back(ROOT)
    job.commit([0, 1])
    job.say("started_anew", replica=0, step=0)
    job.commit([0, 1])
    assert "ended with one of" in "".join(audit(job.events).notes)


def test_history_that_begins_at_a_checkpoint_is_unknown() -> None:
    """A run that resumed another run's checkpoint has no events of the batches before it."""
    job = clean_job(3)
    saved, job.events = job.state, []
    job.say("checkpoint_loaded", replica=0, step=3, lineage=saved)
    job.commit([0, 1])
    assert brief(audit(job.events)) == ("unknown", 4, 0, 0, 0)


def test_constant_policy() -> None:
    """Another group trains an absent group's slot; that slot is no participant, and nothing is lost
    or repeated.
    """
    job = clean_job(2)
    for _ in range(3):
        job.commit([0], reads={0: [0, 1]})
    job.commit([0, 1])
    assert brief(audit(job.events)) == ("holds", 24, 0, 0, 0)


def test_two_groups_that_read_the_same_slot() -> None:
    """Batches that two groups trained in one step are repeats, although the step counts
    them once.
    """
    job = Job(3)
    job.commit([0, 1], reads={0: [0, 2], 1: [1, 2]})
    found = audit(job.events)
    assert brief(found) == ("does not hold", 6, 0, 2, 0)
    assert [repeat.slot for repeat in found.repeated] == [2]
    assert "trained by several groups at step 1" in format_audit(found)


def test_batches_that_nobody_read_are_lost() -> None:
    """Counted batches that no group read are lost; a group that died without a report leaves it
    open.
    """
    job = Job()
    job.commit([0, 1], reads={0: [0], 1: []}, batches={"0": [0, 2], "1": [0, 2]})
    found = audit(job.events)
    assert brief(found) == ("does not hold", 2, 2, 0, 0)
    assert "read by no group" in format_audit(found)
    job = Job()
    job.commit([0, 1], by=[0])
    assert audit(job.events).verdict == "holds"


def test_reading_that_is_not_counted() -> None:
    """Batches that a group trained and the step does not count contradict the ledger."""
    job = Job()
    job.commit([0, 1], batches={"0": [0, 2], "1": [0, 1]})
    found = audit(job.events)
    assert found.verdict == "does not hold"
    assert found.conflicts == ["step 1: slot 1, batch 1: trained by group 1, not counted"]


def test_events_that_disagree_about_one_state() -> None:
    """Two groups that report different batches for one state do not hold, whichever is right."""
    job = clean_job()
    change(job.events[-1], batches={"0": [8, 2]})
    found = audit(job.events)
    assert found.verdict == "does not hold"
    assert "disagree about the batches of step 5" in found.conflicts[0]


def two_ends(job: Job, **fields: Any) -> tuple[str, str]:
    """Let groups 0 and 1 end in two states of one step."""
    before = job.state
    first = job.commit([0, 1], by=[0])
    job.go_back(before)
    return first, job.commit([1], **fields)


def test_two_lineages_at_the_end() -> None:
    """If the job may have ended with either of two states, a common verdict of both counts; else it
    is unknown.
    """
    job = clean_job(3)
    two_ends(job)
    found = audit(job.events)
    assert found.verdict == "holds"
    assert "the verdict is the same for each" in found.notes[0]

    job = clean_job(3)
    good, bad = two_ends(job, first={1: 8})
    assert audit(job.events).verdict == "unknown"
    for final, verdict in ((good, "holds"), (bad, "does not hold")):
        finished = make("training_finished", time=99.0, step=4, lineage=final)
        assert audit([*job.events, finished]).verdict == verdict


def test_final_state_that_no_commit_tells_of() -> None:
    """A job that ended with a state whose commit is missing is unknown."""
    job = clean_job(3)
    job.say("training_finished", replica=0, step=4, lineage="abcdefabcdef")
    assert audit(job.events).verdict == "unknown"


def test_data_that_began_anew() -> None:
    """After a reset the numbers restart: no repeats and no differing data are reported, and the
    verdict is unknown.
    """
    job = clean_job(3)
    job.say("checkpoint_loaded", replica=0, step=3, lineage=job.state)
    job.say("data_reset", replica=0, reason="4 shards instead of 2")
    job.ends = {0: 0, 1: 0}
    job.commit([0, 1])
    for event in job.events[-4:]:
        event.data.checksum = "other"
    found = audit(job.events)
    assert brief(found) == ("unknown", 16, 0, 0, 0)
    assert "4 shards instead of 2" in found.unknown[0]
    job.commit([0, 1], first={0: 5})
    assert audit(job.events).verdict == "does not hold"


def test_data_that_began_anew_as_asked_for() -> None:
    """After a requested reset nothing is unknown, because earlier and later batches need not be
    compared.
    """
    job = clean_job(3)
    job.say("checkpoint_loaded", replica=0, step=3, lineage=job.state)
    for group in (0, 1):
        job.say(
            "data_reset",
            replica=group,
            step=3,
            reason="checkpoint.exclude_from_loading names it",
            asked=True,
        )
    job.ends = {0: 0, 1: 0}
    job.commit([0, 1])
    found = audit(job.events)
    assert brief(found) == ("holds", 16, 0, 0, 0)
    assert found.notes == [
        "the data began anew after step 3, as checkpoint.exclude_from_loading asks for: batches count from there"
    ]
    job.commit([0, 1], first={0: 5})
    assert audit(job.events).verdict == "does not hold"


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("data", "unknown"), ("arithmetic", "does not hold"), ("harmless", "does not hold")],
)
def test_data_that_a_resume_was_allowed_to_change(kind: str, verdict: str) -> None:
    """A batch of twice the size is another batch of the same number, so a single training of each
    is unprovable.
    """
    job = clean_job(3)
    saved = job.state
    job.commit([0, 1])
    job.go_back(saved)
    job.say(
        "launch_started",
        changed={"training.local_batch_size": ChangedField(before=2, now=4, kind=kind)},
    )
    job.say("checkpoint_loaded", replica=0, step=3, lineage=saved)
    job.commit([0, 1])
    for event in job.events[-4:]:
        if event.name == "step_committed":
            event.data.checksum = "other"
    found = audit(job.events)
    assert found.verdict == verdict
    assert (found.num_lost, found.num_repeated) == (0, 0)
    if kind == "data":
        assert found.unknown[0] == (
            "the data was changed at a resume (training.local_batch_size = 4 (was 2, of the data)): nothing before it "
            "compares with it"
        )


def test_random_faults() -> None:
    """Random deaths, void steps and resumes always hold; without the events of one step they are
    unknown.
    """
    rng = random.Random(1)
    for _ in range(30):
        job, states = Job(3), [ROOT]
        for _ in range(30):
            groups = sorted(rng.sample(range(3), rng.randint(1, 3)))
            before = job.state
            if rng.random() < 0.2:
                job.commit(groups, by=groups[:1])
                job.go_back(before)
            if rng.random() < 0.05 and len(states) > 5:
                del states[-4:]
                job.go_back(states[-1])
                job.say("checkpoint_loaded", step=job.step, lineage=job.state)
            states.append(job.commit(groups))
        states.append(job.commit([0, 1, 2]))
        found = audit(job.events)
        assert (found.verdict, found.notes) == ("holds", [])
        assert found.num_batches == sum(job.ends.values())
        gone = rng.choice(states[1:-1])
        found = audit(event for event in job.events if getattr(event, "lineage", "") != gone)
        assert found.verdict == "unknown"


def test_text_stays_short() -> None:
    """A long list of findings is cut, with the number of the rest."""
    job = clean_job(1)
    for _ in range(40):
        job.commit([0, 1], first={slot: end + 1 for slot, end in job.ends.items()})
    verdicts = check(RunRecord(job.events))
    num_findings = len(verdicts[6].offences)
    assert num_findings > 70
    text = text_of(make_check_table(verdicts))
    assert f"... {num_findings - MAX_SHOWN} more (--json names them all)" in text
    assert text.count("slot ") < 20


def cut_anew(*cuts: tuple[int, int], first_of: Mapping[int, int] | None = None) -> list[Event]:
    """Make the events of a job of ten steps for each (groups, ranks of a group) with the same
    number of shards.

    Args:
        first_of: first batch by step, if it is not the next one.
    """
    events: list[Event] = [make("loader_checked", exact=True, transparent=True)]
    for launch, (groups, ranks) in enumerate(cuts):
        begin = 100.0 * launch
        steps = range(10 * launch + 1, 10 * launch + 11)
        events.append(
            make("launch_started", time=begin - 1, replicas=groups, ranks_per_replica=ranks)
        )
        for group in range(groups):
            for rank in range(ranks):
                who = {"replica": group, "rank": rank, "pid": 100 * launch + 10 * group + rank}
                events.append(
                    make("worker_started", time=begin, config={"group_size": groups}, **who)
                )
                first = steps[0] - 1
                shard = {"slot": group, "shard": ranks * group + rank, "num_shards": groups * ranks}
                events.append(
                    make("data_opened", time=begin + 1, first_batch=first, **shard, **who)
                )
                for step in steps:
                    first = (first_of or {}).get(step, step - 1)
                    data = {
                        "slot": group,
                        "first_batch": first,
                        "num_batches": 1,
                        "checksum": f"{shard}{first}",
                    }
                    batches = {str(slot): [first, 1] for slot in range(groups)}
                    told = {
                        "step": step,
                        "participants": list(range(groups)),
                        "batches": batches,
                        "data": data,
                    }
                    events.append(make("step_committed", time=begin + 2 + step, **told, **who))
    return events


@pytest.mark.parametrize("cuts", [[(1, 2), (2, 1)], [(2, 1), (1, 2)], [(2, 2), (4, 1), (1, 4)]])
def test_the_same_shards_may_be_cut_into_other_slots(cuts: list[tuple[int, int]]) -> None:
    """A resume with the same number of shards continues each; the audit once said "10 lost: slot 1,
    batches 0-9".
    """
    found = audit(cut_anew(*cuts))
    assert (found.verdict, found.lost, found.repeated, found.conflicts, found.differing) == (
        "holds",
        [],
        [],
        [],
        [],
    )
    shards = cuts[0][0] * cuts[0][1]
    assert found.num_batches == 10 * len(cuts) * shards
    assert f"the same {shards} shards were cut into other slots" in found.notes[-1]


def test_what_is_lost_after_another_cut_is_found() -> None:
    found = audit(cut_anew((1, 2), (2, 1), first_of={step: step for step in range(11, 21)}))
    assert found.verdict == "does not hold"
    assert [str(each) for each in found.lost] == [
        f"slot {slot}, batch 10: lost between steps 10 and 11 (shard {slot} of 2)"
        for slot in (0, 1)
    ]


def write(folder: Path, events: Iterable[Event]) -> None:
    (folder / "events").mkdir()
    (folder / "events" / "a.jsonl").write_text(
        "".join(json.dumps(untyped(event)) + "\n" for event in events)
    )


def lossy(job: Job) -> None:
    job.commit([0, 1], first={0: 20})


def cut(job: Job) -> None:
    del job.events[:4]


def nothing(job: Job) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "verdict"), [(nothing, "holds"), (lossy, "does not hold"), (cut, "unknown")]
)
def test_command(
    change: Callable[[Job], None], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON of `check` has the whole audit."""
    job = clean_job()
    change(job)
    write(tmp_path, job.events)
    main(["check", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["audit"]["verdict"] == verdict


# Rounds of a semi-synchronous method


def job_in_rounds() -> Job:
    """Return a job of two groups that is to commit rounds of five steps."""
    job = Job()
    config = {"group_size": 2, "steps": 100, "semi_sync_method": "diloco", "sync_steps": 5}
    for replica in (0, 1):
        job.say("worker_started", replica=replica, config=config)
    return job


def commit_round(job: Job, groups: Iterable[int] = (0, 1), **fields: Any) -> None:
    """Make a round of ten seconds, of two batches of each group."""
    job.time += 10.0
    job.commit(
        groups, compute_seconds=9.0, seconds=9.5, exchange_seconds=0.5, forward_passes=2, **fields
    )


def test_batches_of_a_round_that_a_group_left_are_void() -> None:
    """They are counted as the group reported them, once for all ranks, and are no repeats when
    trained again.
    """
    job = job_in_rounds()
    commit_round(job)
    for rank in (0, 1):
        told = reading(1, 2, rank)
        job.say(
            "drained",
            replica=1,
            rank=rank,
            step=1,
            in_order=False,
            reason="SIGTERM",
            void=[told],
            lineage=None,
        )
    commit_round(job, [0])
    commit_round(job)
    found = audit(job.events)
    assert brief(found) == ("holds", 10, 0, 0, 2)
    assert [str(each) for each in found.void] == [
        "slot 1, batches 2-3: void: group 1 left in round 2"
    ]
    assert found.num_cut_short == 0
    assert found.to_dict()["unit"] == "round"


def test_batches_that_ranks_of_a_group_tell_differently_are_void_once() -> None:
    """After a drain timeout one rank may have read a step further; another attempt has trained
    other batches.
    """
    job = job_in_rounds()
    commit_round(job)
    for attempt, rank, number in ((0, 0, 2), (0, 1, 3), (1, 0, 1)):
        told = {**reading(1, 2, rank), "num_batches": number}
        job.say(
            "drained",
            replica=1,
            rank=rank,
            attempt=attempt,
            step=1,
            in_order=False,
            reason="timeout",
            void=[told],
        )
    found = audit(job.events)
    assert [(each.slot, each.first_batch, each.num_batches) for each in found.void] == [
        (1, 2, 3),
        (1, 2, 1),
    ]


def test_batches_of_a_round_that_died_with_its_group_are_estimated() -> None:
    """No event reports them. The group's training time and its pace give an estimate. If a commit
    is one step, nothing is estimated: it is that one batch.
    """
    for config, number in (({"semi_sync_method": "diloco", "sync_steps": 5}, 4), ({}, 0)):
        job = Job()
        for replica in (0, 1):
            job.say(
                "worker_started", replica=replica, config={"group_size": 2, "steps": 100, **config}
            )
        for _ in range(3):
            job.time += 10.0
            job.commit(
                [0, 1], compute_seconds=8.0, seconds=8.5, exchange_seconds=0.5, forward_passes=8
            )
        job.time += 4.0
        job.say("worker_exited", replica=1, attempt=0, signal="SIGKILL", stopped=False)
        job.time += 4.0
        job.commit([0], compute_seconds=8.0, seconds=8.5, exchange_seconds=0.5, forward_passes=8)
        found = audit(job.events)
        assert brief(found) == ("holds", 14, 0, 0, 0)
        assert found.num_cut_short == pytest.approx(number, abs=1)
        assert any("void too" in note for note in found.notes) == bool(number)


def test_pace_is_that_of_a_step() -> None:
    """A round with few steps of a group, because it joined in the middle, is no measure of
    a round.
    """
    job = job_in_rounds()
    for passes in (8, 2, 2):
        job.time += passes
        job.commit(
            [0, 1],
            compute_seconds=float(passes),
            seconds=passes,
            exchange_seconds=0.0,
            forward_passes=passes,
        )
    job.time += 4.0
    job.say("worker_exited", replica=1, attempt=0, signal="SIGKILL", stopped=False)
    job.time += 4.0
    job.commit([0], compute_seconds=8.0, seconds=8.0, exchange_seconds=0.0, forward_passes=8)
    assert audit(job.events).num_cut_short == pytest.approx(4, abs=1)


def test_findings_speak_of_rounds() -> None:
    """Lost and repeated batches are named by their rounds."""
    job = job_in_rounds()
    commit_round(job)
    commit_round(job, first={0: 6})
    commit_round(job, first={0: 6})
    found = audit(job.events)
    assert [str(each) for each in found.lost] == [
        "slot 0, batches 2-5: lost between rounds 1 and 2"
    ]
    assert [each.detail for each in found.repeated] == ["trained at round 2 and again at round 3"]


def test_return_to_a_checkpoint_is_explained_by_its_state() -> None:
    """A checkpoint's step is torchtitan's, and not the number of the round that the job continues
    from.
    """
    job = job_in_rounds()
    states = []
    for _ in range(5):
        commit_round(job)
        states.append(job.state)
    saved = states[2]
    job.go_back(saved)
    job.say("checkpoint_loaded", replica=0, step=15, lineage=saved)
    commit_round(job)
    found = audit(job.events)
    assert brief(found) == ("holds", 16, 0, 0, 8)
    assert not found.notes


# Fragments of a model that are exchanged in turn


HEAL = {"donor": 0, "from_step": 1, "bytes": 1, "seconds": 1.0, "replayed": 0}


def job_in_fragments(number: int, **config: Any) -> Job:
    """Make a job of two groups with `number` fragments; a round has five steps, the job 20
    rounds.
    """
    job = Job()
    rounds = {
        "semi_sync_method": "diloco",
        "sync_steps": 5 * number,
        "round_steps": 5,
        "steps": 100,
        "group_size": 2,
    }
    for replica in (0, 1):
        job.say("worker_started", replica=replica, config={**rounds, **config})
    return job


def partial(job: Job) -> list[str]:
    found = audit(job.events)
    assert found.verdict == "holds"
    assert found.num_partial == sum(each.num_batches for each in found.partial)
    return [str(each) for each in found.partial]


def test_batches_of_a_group_that_died_are_in_some_fragments_only() -> None:
    """Batches of a dead group's last rounds are partial, except in fragments exchanged since; a
    live group's are not.
    """
    job = job_in_fragments(3)
    for _ in range(4):
        commit_round(job)
    assert partial(job) == []  # it goes on, for all that is known
    job.say("worker_exited", replica=1, attempt=0, signal="SIGKILL", stopped=False)
    commit_round(job, [0])
    job.say("heal_finished", replica=1, rank=0, attempt=0, step=5, **HEAL)
    commit_round(job)
    assert partial(job) == [
        "slot 1, batches 4-5: partial: trained at round 3 by group 1, in 2 of 3 fragments",
        "slot 1, batches 6-7: partial: trained at round 4 by group 1, in 1 of 3 fragments",
    ]
    found = audit(job.events)
    assert found.counts() == "22 trained once (4 of them partial), 0 lost, 0 repeated, 0 void"
    assert found.to_dict()["num_partial"] == 4
    assert "partial: trained at round 4" in format_audit(found)


FIRST = "slot 1, batches 0-1: partial: trained at round 1 by group 1, in 1 of 2 fragments"
SECOND = "slot 1, batches 2-3: partial: trained at round 2 by group 1, in 1 of 2 fragments"


@pytest.mark.parametrize(("event", "fields"), [("heal_finished", HEAL), ("rolled_back", {})])
def test_batches_of_a_group_that_healed_are_partial(event: str, fields: dict[str, Any]) -> None:
    """A healing group replaces its weights by the anchors; one that returns to its own state keeps
    them.
    """
    job = job_in_fragments(2)
    commit_round(job)
    for rank in (0, 1):
        job.say(event, replica=1, rank=rank, attempt=0, step=1, **fields)
    commit_round(job)
    assert partial(job) == ([FIRST] if event == "heal_finished" else [])


def test_a_group_without_tokens_in_a_round_has_lost_nothing() -> None:
    """It contributes former rounds' changes; a group with a nonfinite change contributes nothing,
    and heals.
    """
    for excluded in (False, True):
        job = job_in_fragments(2)
        commit_round(job)
        commit_round(job, [0], by=[0, 1])
        if excluded:
            job.say("gradient_excluded", replica=0, rank=0, attempt=0, step=2, slots=[1])
            job.say("heal_finished", replica=1, rank=0, attempt=0, step=2, **HEAL)
        commit_round(job)
        commit_round(job)
        assert partial(job) == ([FIRST] if excluded else [])


def test_a_run_that_is_made_longer_exchanged_all_at_its_end() -> None:
    """The config of the processes that made the last round counts."""
    job = job_in_fragments(2, steps=10)
    commit_round(job)
    commit_round(job)
    config = {
        "semi_sync_method": "diloco",
        "sync_steps": 10,
        "round_steps": 5,
        "steps": 100,
        "group_size": 2,
    }
    for replica in (0, 1):
        job.say(
            "worker_exited", replica=replica, rank=0, attempt=0, worker_pid=1, code=0, stopped=False
        )
        job.say("worker_started", replica=replica, rank=0, attempt=0, pid=9, config=config)
        job.say("heal_finished", replica=replica, rank=0, attempt=0, pid=9, step=2, **HEAL)
    commit_round(job, pid=9)
    assert partial(job) == []


def test_a_joiner_that_dies_behind_its_first_exchange() -> None:
    """Its round is not reported, and must not be taken for one of the previous attempt."""
    job = job_in_fragments(2)
    commit_round(job)
    job.say(
        "worker_exited", replica=1, rank=0, attempt=0, worker_pid=1, signal="SIGKILL", stopped=False
    )
    config = {
        "semi_sync_method": "diloco",
        "sync_steps": 10,
        "round_steps": 5,
        "steps": 100,
        "group_size": 2,
    }
    job.say("worker_started", replica=1, rank=0, attempt=1, pid=2, config=config)
    job.say("heal_finished", replica=1, rank=0, attempt=1, pid=2, step=1, **HEAL)
    commit_round(job, by=[0])
    commit_round(job, [0])
    job.say(
        "worker_exited", replica=1, rank=0, attempt=1, worker_pid=2, signal="SIGKILL", stopped=False
    )
    assert partial(job) == [FIRST, SECOND]


def test_batches_of_a_group_that_died_behind_the_exchange_are_partial() -> None:
    """The group's own events do not include its last round."""
    job = job_in_fragments(2)
    commit_round(job)
    commit_round(job, by=[0])
    assert partial(job) == []  # it may be about to tell
    job.say(
        "worker_exited", replica=1, rank=0, attempt=0, worker_pid=1, signal="SIGKILL", stopped=False
    )
    commit_round(job, [0])
    assert partial(job) == [SECOND]


def test_the_last_round_leaves_nothing_partial() -> None:
    """The last round exchanges all fragments; if finite data ends the run before it, all groups'
    batches are partial.
    """
    for steps, number in ((10, 0), (100, 2)):
        job = job_in_fragments(2, steps=steps)
        commit_round(job)
        commit_round(job)
        for replica in (0, 1):
            job.say(
                "training_finished",
                replica=replica,
                rank=0,
                attempt=0,
                step=2,
                tokens=9,
                lineage=job.state,
            )
        assert len(partial(job)) == number


def test_a_job_that_goes_on_with_other_fragments() -> None:
    """Partial batches follow from the fragments at the group's time, not from the job's current
    ones.
    """
    job = job_in_fragments(1)
    commit_round(job)
    config = {
        "semi_sync_method": "diloco",
        "sync_steps": 10,
        "round_steps": 5,
        "steps": 100,
        "group_size": 2,
    }
    for replica in (0, 1):
        job.say("worker_started", replica=replica, rank=0, attempt=0, pid=9, config=config)
    commit_round(job, pid=9)
    commit_round(job, pid=9)
    job.say(
        "worker_exited", replica=1, rank=0, attempt=0, worker_pid=9, signal="SIGKILL", stopped=False
    )
    commit_round(job, [0], pid=9)
    assert partial(job) == [
        "slot 1, batches 4-5: partial: trained at round 3 by group 1, in 1 of 2 fragments"
    ]


def test_whole_models_leave_nothing_partial() -> None:
    """With a single fragment each exchange has the group's whole change."""
    job = job_in_fragments(1)
    commit_round(job)
    commit_round(job, [0])
    assert partial(job) == []
