# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The texts of a run's report beside its charts: the run, its recoveries, its goodput."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from titan_ft.history.check import check
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.notes import find_notes, name_groups
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.report.phases import TimeInState, add_up_job
from titan_ft.history.report.style import DETAILS, STATES, Look, state_order
from titan_ft.history.report.words import format_duration, format_percent
from titan_ft.history.summary import describe_sent, summarize
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.incidents import Incident, count_faults, find_incidents
from titan_ft.run import events as ev


@dataclass(frozen=True)
class Recovery:
    """A fault, or a failure without an injected fault, and its cost."""

    time: float
    """Seconds since the beginning."""
    step: int | None
    """The first step that was committed afterwards; None if none was."""
    incident: Incident

    @property
    def target(self) -> str:
        """The groups, or the lighthouse, that the fault hit, in words."""
        if self.incident.replicas:
            return name_groups(self.incident.replicas, self.incident.rank)
        if self.incident.lighthouse:
            return "lighthouse"
        return "none"


def report_figures(record: RunRecord, against: RunRecord | None = None) -> dict[str, Any]:
    """Return the figures of a run for JSON: those of its summary, and more. `against` is
    `check`'s.
    """
    return summarize(record).to_dict() | {
        "chaos": plan_of(record),
        "faults_by_kind": count_faults(record),
        "goodput": measure_goodput(record).to_dict(),
        "stalls": [each.incident.to_dict() for each in find_recoveries(record)],
        "check": check(record, against).to_dict(),
        "notes": [asdict(note) for note in find_notes(record)],
    }


@once_per_record
def find_recoveries(record: RunRecord) -> list[Recovery]:
    """Return the faults and the failures of a run, in order of time."""
    found = []
    commits = record.commits
    for incident in find_incidents(record):
        if not incident.is_listed:
            continue
        step = None
        place_after = bisect_right(commits, incident.time, key=lambda event: event.time)
        if place_after < len(commits):
            step = commits[place_after].step
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
    """Return the known facts of a run, each with its name: date, model, data, machine, config."""
    started = record.of(ev.WorkerStarted)
    setups = [event.setup for event in started if event.setup is not None]
    hosts = {event.host for event in started if event.host}
    facts = [
        ("date", _describe_date(record)),
        ("model", _describe_model(setups)),
        ("data", _describe_data(setups)),
        ("groups", _describe_groups(record)),
        ("machine", _describe_machine(setups, hosts)),
        ("versions", _list_distinct(map(_describe_versions, setups))),
        ("config", _describe_config(record)),
        ("faults", _describe_faults(record)),
        # Without a reason, the outcome at the top of the page describes the end.
        ("end", plan_of(record).get("reason", "")),
    ]
    return [(name, text) for name, text in facts if text]


def _describe_date(record: RunRecord) -> str:
    if not record.events:
        return ""
    begin = datetime.fromtimestamp(record.begin, UTC)
    return (
        f"{begin:%Y-%m-%d %H:%M:%S} UTC, {format_duration(measure_goodput(record).wall_us / 1e6)}"
    )


def _describe_groups(record: RunRecord) -> str:
    summary = summarize(record)
    return f"{summary.num_groups}, of {count(summary.ranks_per_group, 'rank')} each"


def _describe_model(setups: Sequence[ev.Setup]) -> str:
    if not setups:
        return ""
    setup = setups[-1]
    degrees = []
    for name, degree in setup.parallelism.items():
        dimension = name.removesuffix("_degree").replace("_", " ")
        degrees.append(f"{dimension} {degree}")
    if not degrees:
        return setup.model
    return f"{setup.model}; {', '.join(degrees)}"


def _describe_data(setups: Sequence[ev.Setup]) -> str:
    if not setups:
        return ""
    setup = setups[-1]
    batch = f"{setup.local_batch_size} a rank"
    if setup.global_batch_size > 0:
        batch = f"{setup.global_batch_size} a step"
    return f"{setup.dataset}; sequences of {setup.seq_len:,} tokens, {batch}"


def _describe_machine(setups: Sequence[ev.Setup], hosts: Collection[str]) -> str:
    """Return the hosts of a run and their devices, in words."""
    devices = _list_distinct(f"{each.device} ({count(each.num_cpus, 'CPU')})" for each in setups)
    where = ""
    if len(hosts) > 4:
        where = f"on {len(hosts)} hosts"
    elif hosts:
        where = f"on {', '.join(sorted(hosts))}"
    return ", ".join(filter(None, (devices, where)))


def _describe_versions(setup: ev.Setup) -> str:
    return ", ".join(f"{name} {number}" for name, number in setup.versions.items())


def _describe_config(record: RunRecord) -> str:
    """Return the file and the most telling settings of the latest config."""
    started = record.of(ev.WorkerStarted)
    configs = [event.config for event in started if event.config is not None]
    if not configs:
        return ""
    names = ["min_replica_size", "batch_policy", "lr_policy", "digest_every"]
    names.append("hang_timeout_seconds")
    if record.unit.method:
        names += ["semi_sync_method", "sync_steps"]
    settings = ", ".join(f"{name} {getattr(configs[-1], name)}" for name in names)
    launches = record.of(ev.LaunchStarted)
    if launches and launches[-1].config_file:
        return f"{launches[-1].config_file}; {settings}"
    return settings


def _describe_faults(record: RunRecord) -> str:
    """Return the number of injected faults by kind, with their plan and seed."""
    injected = count_faults(record)
    if not injected:
        return ""
    plan = plan_of(record)
    plans = [str(plan[name]) for name in ("plan", "schedule") if plan.get(name)]
    seed = ""
    if plan.get("seed") is not None:
        seed = f"seed {plan['seed']}"
    source = "; ".join(filter(None, (", ".join(plans), seed)))
    text = f"{sum(injected.values()):,} injected"
    if source:
        text += f" ({source})"
    kinds = ", ".join(f"{kind} {times}" for kind, times in injected.items())
    return f"{text}: {kinds}"


def _list_distinct(values: Iterable[str]) -> str:
    """Return different values, each once, in the order of their first times."""
    return " / ".join(dict.fromkeys(values))


class Term(NamedTuple):
    """A figure of a run's time or work, and a sentence that explains it."""

    name: str
    value: str
    meaning: str


def list_goodput_terms(record: RunRecord) -> list[Term]:
    """Return the figures of a run's time and work."""
    summary = summarize(record)
    spent = measure_goodput(record)
    noun = record.unit.noun
    in_training = format_percent(spent.effective_training_time_in_training)
    terms = [
        Term(
            "Effective training time",
            format_percent(spent.effective_training_time),
            f"Committed {noun}s, each with the usual {noun} at most and the share of groups that "
            "took part in it, as a part of the whole time from launch to end. From the first "
            f"{noun} to the last it is {in_training}.",
        )
    ]
    num_kept = spent.forward_passes - spent.num_wasted
    work = "Forward passes that became a part of the job's last state: "
    work += f"{num_kept:,} of {spent.forward_passes:,}"
    if spent.wasted:
        wasted = [f"{number:,} {why}" for why, number in spent.wasted.items()]
        work += f". In vain: {'; '.join(wasted)}"
    share = _percent_of(num_kept, spent.forward_passes)
    terms.append(Term("Committed work", share, f"{work}."))
    committed = spent.exchanges_committed
    attempted = spent.exchanges_attempted
    terms.append(
        Term(
            "Exchanges at the first try",
            _percent_of(committed, attempted),
            f"Exchanges of gradients that became a {noun}: {committed:,} of {attempted:,}. One "
            "that breaks is repeated from the same gradients.",
        )
    )
    if summary.wire_bytes:
        sent = f"To other groups, by all ranks: {describe_sent(summary)}."
        terms.append(Term("Gradients sent", f"{summary.wire_bytes / 1e6:,.1f} MB", sent))
    usual = f"Median time from a {noun} to the next, where all groups made both at the first try."
    terms.append(Term(f"Usual {noun}", format_duration(spent.usual_step_seconds), usual))
    batches = summary.batches or "The history does not tell"
    repeated = f"{summary.recomputed_forward_passes:,} forward passes repeated"
    answer = {"holds": "yes", "does not hold": "no"}.get(summary.every_batch_once, "unknown")
    terms.append(Term("Every batch once", answer, f"{batches}; {repeated}."))
    return terms


def _percent_of(part: int, whole: int) -> str:
    """Return a part in per cent of the whole; unknown if the whole is 0."""
    if not whole:
        return format_percent(None)
    return format_percent(part / whole)


class StateShare(NamedTuple):
    """A state in which groups spent time.

    Attributes:
        share: of all groups' time, in words.
        spent: the time, in words.
        meaning: of the state, with the components of the time.
    """

    look: Look
    share: str
    spent: str
    meaning: str


def list_state_shares(record: RunRecord) -> list[StateShare]:
    """Return the states in which groups spent their time, in the order of the chart."""
    times = add_up_job(record)
    whole_us = measure_goodput(record).group_us or 1
    rows = []
    for state in state_order(set(times)):
        time = times[state]
        if not time.num_us:
            continue
        share = format_percent(time.num_us / whole_us)
        spent = format_duration(time.num_us / 1e6)
        rows.append(StateShare(STATES[state], share, spent, _describe_state(state, time)))
    return rows


def _describe_state(state: str, time: TimeInState) -> str:
    """Return the meaning of a state, and the components of the time in it if there are several."""
    parts = []
    for fine_state, num_us in time.parts.most_common():
        if num_us:
            parts.append(f"{DETAILS[fine_state]} {format_duration(num_us / 1e6)}")
    meaning = STATES[state].meaning
    if len(parts) <= 1:
        return meaning
    components = "; ".join(parts)
    return f"{meaning} {components[:1].upper()}{components[1:]}."
