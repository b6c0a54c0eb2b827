# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The texts of a run's report beside its charts: the run, its recoveries, its goodput."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from titan_ft.history.check import check
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.notes import find_notes, name_groups
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.report.phases import add_up, find_phases
from titan_ft.history.report.style import DETAILS, STATES, Look, state_order
from titan_ft.history.report.words import duration, percent
from titan_ft.history.summary import describe_sent, summarize
from titan_ft.history.timing.goodput import goodput
from titan_ft.history.timing.incidents import Incident, count_faults, find_incidents
from titan_ft.run import events as ev


@dataclass(frozen=True)
class Recovery:
    """A fault, or a failure without an injected fault, and its cost."""

    time: float
    """Seconds since the beginning."""
    step: int | None
    """The first step that was committed after it; None if none was."""
    incident: Incident

    @property
    def target(self) -> str:
        """Its target, in words."""
        if not self.incident.replicas:
            return "lighthouse" if self.incident.lighthouse else "none"
        return name_groups(self.incident.replicas, self.incident.rank)


def report_figures(record: RunRecord, against: RunRecord | None = None) -> dict[str, Any]:
    """Return the figures of a run for JSON: those of its summary, and more. `against` is
    `check`'s.
    """
    return summarize(record).to_dict() | {
        "chaos": plan_of(record),
        "faults_by_kind": count_faults(record),
        "goodput": goodput(record).to_dict(),
        "stalls": [each.incident.to_dict() for each in find_recoveries(record)],
        "check": check(record, against).to_dict(),
        "notes": [asdict(note) for note in find_notes(record)],
    }


@view
def find_recoveries(record: RunRecord) -> list[Recovery]:
    """Return the faults and the failures of a run, in order of time."""
    found = []
    for incident in find_incidents(record):
        if incident.is_listed:
            after = bisect_right(record.commits, incident.time, key=lambda event: event.time)
            step = record.commits[after].step if after < len(record.commits) else None
            found.append(Recovery(incident.time - record.begin, step, incident))
    return found


def plan_of(record: RunRecord) -> dict[str, Any]:
    """Return the latest seed, plan and schedule of a run's chaos, and why the chaos ended."""
    run = record.fold
    found: dict[str, Any] = {}
    if run.plan is not None:
        found |= {"seed": run.plan.seed, "plan": run.plan.plan, "schedule": run.plan.schedule}
    elif run.fault_seed is not None:
        found["seed"] = run.fault_seed
    if run.launch is not None:
        found["job_id"] = run.launch.job_id
    if run.launch_end is not None:
        found["reason"] = run.launch_end.reason
    return found


def describe_run(record: RunRecord) -> list[tuple[str, str]]:
    """Return what was run, when, where and how, as far as the history shows: name and value of each
    fact.
    """
    plan, started, s = plan_of(record), record.of(ev.WorkerStarted), summarize(record)
    setups = [event.setup for event in started if event.setup is not None]
    configs = [event.config for event in started if event.config is not None]
    begin = datetime.fromtimestamp(record.begin, UTC) if record.events else None
    found = {
        "date": f"{begin:%Y-%m-%d %H:%M:%S} UTC, {duration(goodput(record).wall_us / 1e6)}"
        if begin
        else "",
        "end": plan.get("reason", ""),  # without one the outcome says what is known
        "groups": f"{s.num_groups}, of {count(s.ranks_per_group, 'rank')} each",
        "machine": _machine(setups, {event.host for event in started if event.host}),
        "versions": _each(
            ", ".join(f"{name} {number}" for name, number in one.versions.items()) for one in setups
        ),
    }
    if setups:
        one = setups[-1]
        batch = (
            f"{one.global_batch_size} a step"
            if one.global_batch_size > 0
            else f"{one.local_batch_size} a rank"
        )
        degrees = ", ".join(
            f"{name.removesuffix('_degree')} {degree}" for name, degree in one.parallelism.items()
        )
        found["model"] = one.model + (f"; {degrees.replace('_', ' ')}" if degrees else "")
        found["data"] = f"{one.dataset}; sequences of {one.seq_len:,} tokens, {batch}"
    if configs:
        names = (
            "min_replica_size",
            "batch_policy",
            "lr_policy",
            "digest_every",
            "hang_timeout_seconds",
        )
        rounds = ("semi_sync_method", "sync_steps") if record.unit.method else ()
        settings = ", ".join(f"{name} {getattr(configs[-1], name)}" for name in (*names, *rounds))
        path = _each(
            event.config_file for event in record.of(ev.LaunchStarted)[-1:] if event.config_file
        )
        found["config"] = f"{path}; {settings}" if path else settings
    injected = count_faults(record)
    if injected:
        number = sum(injected.values())
        plans = ", ".join(str(plan[name]) for name in ("plan", "schedule") if plan.get(name))
        seed = f"seed {plan['seed']}" if plan.get("seed") is not None else ""
        source = "; ".join(filter(None, (plans, seed)))
        kinds = ", ".join(f"{kind} {times}" for kind, times in injected.items())
        found["faults"] = f"{number:,} injected{f' ({source})' if source else ''}: {kinds}"
    order = ("date", "model", "data", "groups", "machine", "versions", "config", "faults", "end")
    return [(name, found[name]) for name in order if found.get(name)]


def _machine(setups: Sequence[ev.Setup], hosts: Collection[str]) -> str:
    """Return the hosts of a run and what is in them, in words."""
    devices = _each(f"{one.device} ({count(one.num_cpus, 'CPU')})" for one in setups)
    where = ", ".join(sorted(hosts)) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    return ", ".join(filter(None, (devices, where and f"on {where}")))


def _each(values: Iterable[str]) -> str:
    """Return different values, each once."""
    return " / ".join(dict.fromkeys(values))


def goodput_terms(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures of a run's time and work: term, value and a sentence that explains it."""
    s, spent, noun = summarize(record), goodput(record), record.unit.noun
    counted = spent.forward_passes - spent.num_wasted
    share = percent(spent.effective_training_time_in_training)
    waste = "; ".join(f"{number:,} {why}" for why, number in spent.wasted.items())
    return [
        (
            "Effective training time",
            percent(spent.effective_training_time),
            f"Committed {noun}s, each with the usual {noun} at most and the share of groups that took part in it, as a "
            f"part of the whole time from launch to end. From the first {noun} to the last it is {share}.",
        ),
        (
            "Committed work",
            percent(counted / spent.forward_passes if spent.forward_passes else None),
            f"Forward passes that became a part of the job's last state: {counted:,} of {spent.forward_passes:,}"
            f"{f'. In vain: {waste}' if waste else ''}.",
        ),
        (
            "Exchanges at the first try",
            percent(
                spent.exchanges_committed / spent.exchanges_attempted
                if spent.exchanges_attempted
                else None
            ),
            f"Exchanges of gradients that became a {noun}: {spent.exchanges_committed:,} of "
            f"{spent.exchanges_attempted:,}. One that breaks is repeated from the same gradients.",
        ),
        *(
            [
                (
                    "Gradients sent",
                    f"{s.wire_bytes / 1e6:,.1f} MB",
                    f"To other groups, by all ranks: {describe_sent(s)}.",
                )
            ]
            if s.wire_bytes
            else []
        ),
        (
            f"Usual {noun}",
            duration(spent.usual_step_seconds),
            f"Median time from a {noun} to the next, where all groups made both at the first try.",
        ),
        (
            "Every batch once",
            {"holds": "yes", "does not hold": "no"}.get(s.every_batch_once, "unknown"),
            f"{s.batches or 'The history does not tell'}; {s.recomputed_forward_passes:,} forward passes repeated.",
        ),
    ]


def states_spent(record: RunRecord) -> list[tuple[Look, str, str, str]]:
    """Return the states in which groups spent their time, in the order of the chart.

    For each state: its look, its share of all groups' time, the time, and the time's components.
    """
    spent = add_up(phase for row in find_phases(record).values() for phase in row)
    whole = goodput(record).group_us or 1
    rows = []
    for state in state_order({state for state, time in spent.items() if time.num_us}):
        time = spent[state]
        parts = [
            f"{DETAILS[fine]} {duration(us / 1e6)}" for fine, us in time.parts.most_common() if us
        ]
        consists = f" {'; '.join(parts)}." if len(parts) > 1 else ""
        meaning = f"{STATES[state].meaning}{consists[:2].upper()}{consists[2:]}"
        rows.append(
            (STATES[state], percent(time.num_us / whole), duration(time.num_us / 1e6), meaning)
        )
    return rows
