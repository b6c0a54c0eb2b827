# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the figures as Markdown, which a terminal shows well enough and a README takes as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from statistics import median
from typing import Any

from benchmarks.diloco import CASE as DILOCO
from benchmarks.diloco import STEPS as DILOCO_STEPS
from benchmarks.links import MODES, RATES_MBPS, UNTHROTTLED
from benchmarks.rounds import CASES, NUMS_GROUPS, SEED, SETTINGS
from benchmarks.steady import spread
from benchmarks.systems import NUM_GROUPS, OURS, PEER, TITLES

Costs = Sequence[Mapping[str, Any]]
_LEAST_THREAD_MS = 1.0  # of a step; torch has dozens of idle threads


def format_report(report: Mapping[str, Any], parts: Sequence[str]) -> str:
    """Return machine, command and the tables of what was measured, as far as `parts` asks for
    it.
    """
    machine = report["machine"]
    lines = [
        "{cpu}, {cores} cores, {memory_gib} GiB, load {load}; {platform}".format(**machine),
        "Python {python}, torch {torch}, torchtitan {torchtitan}, torchft {torchft}".format(
            **machine
        ),
        report["command"],
    ]
    if "steady" in report:
        lines += ["", *_steady_rows(report["steady"])]
    if report.get("kills"):
        lines += ["", *_kill_table(report["kills"], parts)]
    for name, figures in report.get("recovery", {}).items():
        lines += ["", *_RECOVERY_TABLES[name](figures)]
    for name in [part for part in _ROUNDS_TABLES if report.get("rounds", {}).get(part)]:
        lines += ["", *_ROUNDS_TABLES[name](report["rounds"][name])]
    if report.get("transfer"):
        lines += ["", *_transfer_table(report["transfer"])]
    if report.get("exchange"):
        lines += ["", *_bandwidth_table(report["exchange"])]
    if report.get("reopening"):
        lines += ["", *_reopening_table(report["reopening"])]
    if report.get("control"):
        lines += ["", *_control_table(report["control"])]
        lines += ["", *_meeting_table(report["control"])]
        lines += ["", *_lighthouse_table(report["control"])]
        lines += ["", *_lighthouse_kill_table(report["control"])]
    if "campaign_table" in report:
        lines += ["", *report["campaign_table"]]
    return "\n".join(lines)


def _steady_rows(steady: Mapping[str, Any]) -> list[str]:
    rows = [["without failures", "step (s)", "ratio of medians", "ratio of means"]]
    for system, figures in steady.items():
        rows.append(
            [
                TITLES[system],
                *(_spread(figures[name]) for name in ("seconds", "ratio", "mean_ratio")),
            ]
        )
    times = [
        [
            "CPU seconds of a step",
            "user, all ranks",
            "system, all ranks",
            "ratio of both",
            "other processes",
        ]
    ]
    for system, figures in steady.items():
        names = ("user", "system", "processor_ratio", "others")
        times.append([TITLES[system], *(_spread(figures[name]) for name in names)])
    return [*markdown(rows), "", *markdown(times), "", *_thread_rows(steady)]


def _thread_rows(steady: Mapping[str, Any]) -> list[str]:
    """Return the CPU time of the ranks' threads, the median of the rounds."""
    rows = [["CPU ms of a step, all ranks", *(TITLES[system] for system in steady)]]
    of_rounds = {
        system: [single["threads"] for single in figures["processor"]]
        for system, figures in steady.items()
    }
    names = sorted({name for rounds in of_rounds.values() for single in rounds for name in single})
    for name in names:
        values = [
            median(single.get(name, 0.0) for single in rounds) * 1000
            for rounds in of_rounds.values()
        ]
        if max(values) >= _LEAST_THREAD_MS:
            rows.append([name, *(f"{value:.0f}" for value in values)])
    return markdown(rows)


def _transfer_table(transfers: Mapping[str, Any]) -> list[str]:
    head = [
        "donors of a state",
        "Mbit/s",
        "of all links",
        "CPU s for each GB that one gives",
        "its steps / before",
    ]
    rows: list[list[str]] = []
    for name, figures in transfers.items():
        if name == "copies":
            continue
        if figures["cpu_seconds_per_gb"] is None:
            rows[-1][-1] = f"{figures['mbps']:.0f}"
            continue
        limit = f"{figures['link_mbps']:g} Mbit/s each" if figures["link_mbps"] else "no limit"
        title = f"{figures['donors']}, {limit}{', TLS' if figures['tls'] else ''}"
        share = "-" if figures["share"] is None else f"{figures['share']:.0%}"
        costs = [f"{figures['cpu_seconds_per_gb']:.2f}", f"{figures['step_ratio']:.3f}"]
        rows.append([title, f"{figures['mbps']:.0f}", share, *costs, "-"])
    lines = markdown([[*head, "one killed: Mbit/s"], *rows])
    if copies := transfers.get("copies"):
        first, later = copies["first_seconds"], copies["later_seconds"]
        lines += [
            "",
            f"a donor's copy of {copies['bytes'] / 2**20:.0f} MiB: {first:.3f} s, each later one {later:.3f} s",
        ]
    return lines


def _reopening_table(reopenings: Mapping[str, Any]) -> list[str]:
    head = [
        "shuffle buffer",
        "opened after",
        "seconds",
        "examples read again",
        "bytes of the state",
    ]
    return markdown([head, *map(_reopening_row, reopenings.values())])


def _reopening_row(figures: Mapping[str, Any]) -> list[str]:
    numbers = [f"{figures[name]:,}" for name in ("buffer_size", "place", "examples", "bytes")]
    buffer_size, place, examples, size = numbers
    return [buffer_size, f"{place} examples", f"{figures['seconds']:.2f}", examples, size]


def _bandwidth_table(exchanges: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            "gradients summed over Gloo, MB/s",
            "bare, 4 in flight",
            "an exchange",
            "bare's time / ours",
        ]
    ]
    for figures in exchanges.values():
        link = f"{figures['mbps']:g} Mbit/s" if figures["mbps"] else "not throttled"
        speeds = [f"{figures[name]:.4g}" for name in ("bare", "ours")]
        rows.append([f"{figures['members']} members, {link}", *speeds, _spread(figures["ratio"])])
    return markdown(rows)


def _control_table(control: Mapping[str, Any]) -> list[str]:
    """Return a row for each number of ranks, and what the formula says about more ranks."""
    measured = [figures for figures in control.values() if "delay_ms" in figures]
    trees = [figures for figures in measured if figures["kind"] == "tree"]
    stores = {figures["ranks"]: figures for figures in measured if figures["kind"] == "store"}
    delays = sorted({figures["delay_ms"] for figures in trees})
    heads = [
        f"by the tree (ms), links of {delay:g} ms" if delay else "by the tree (ms)"
        for delay in delays
    ]
    head = ["an agreement of", "depth", *heads, "CPU of a rank (us)", "of rank 0 (us)"]
    rows = [[*head, "by one TCPStore (ms)", "CPU of a rank (us)"]]
    for size in sorted({figures["ranks"] for figures in trees}):
        by_delay = {figures["delay_ms"]: figures for figures in trees if figures["ranks"] == size}
        first = by_delay[min(by_delay)]
        times = [_control_time(by_delay.get(delay)) for delay in delays]
        cpu = [f"{first['rank_cpu']:.0f}", f"{first['root_cpu']:.0f}"]
        store = stores.get(size)
        store_cpu = "-" if store is None else f"{store['rank_cpu']:.0f}"
        rows.append(
            [f"{size:,} ranks", str(first["depth"]), *times, *cpu, _control_time(store), store_cpu]
        )
    lines = markdown(rows)
    if formula := control.get("formula"):
        lines += [
            "",
            f"The tree: 2 x depth x delay + {formula['a']:.4f} ms x ranks, which share these cores.",
            f"Extrapolated to {formula['ranks']:,} ranks (depth {formula['depth']}), without delay: "
            f"{formula['shared']:.0f} ms on these cores; {formula['apart']:.1f} ms if each inner rank has a core.",
        ]
    return lines


def _meeting_table(control: Mapping[str, Any]) -> list[str]:
    """Return a row for each size of a job: a change of membership, by each way to meet."""
    measured = [figures for figures in control.values() if "return" in figures]
    by_size: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for figures in measured:
        by_size.setdefault((figures["groups"], figures["ranks"]), {})[figures["kind"]] = figures
    columns = ("first meeting (s)", "after a death", "after a return", "CPU of a rank (ms)")
    rows = [
        [
            "groups x ranks",
            *columns,
            *(f"by one store: {name}" for name in columns),
            "with Gloo: after a return",
        ]
    ]
    for (groups, ranks), kinds in by_size.items():
        cells = [f"{groups} x {ranks}"]
        for kind in ("columns", "store"):
            cells += [
                _seconds(kinds.get(kind), name) for name in ("first", "death", "return", "rank_cpu")
            ]
        rows.append([*cells, _seconds(kinds.get("gloo"), "return")])
    lines = markdown(rows)
    if formula := control.get("meeting-formula"):
        sizes = ", ".join(
            f"{size.replace('-', ' x ')}: {seconds:.1f} s"
            for size, seconds in formula["shared"].items()
        )
        lines += [
            "",
            f"The slower one of a death and a return: {formula['a']:.3f} s + {1000 * formula['b']:.3f} ms x all ranks, "
            f"which share these cores. Extrapolated: {sizes}.",
        ]
    return lines


def _seconds(figures: Mapping[str, Any] | None, name: str) -> str:
    return "-" if figures is None else f"{figures[name]:.3f}"


def _lighthouse_table(control: Mapping[str, Any]) -> list[str]:
    """Return a row for each number of groups, and of ended processes that the lighthouse knows."""
    head = [
        "groups",
        "ended processes",
        "quorum (ms)",
        "longest",
        "CPU of the lighthouse",
        "page (MB)",
    ]
    rows = [[*head, "CPU of its reader (ms)", "memory of the lighthouse (MB)"]]
    for figures in control.values():
        if "former" not in figures:
            continue
        times = [f"{figures[name]:.1f}" for name in ("median", "longest", "cpu")]
        page = [f"{figures['page_mb']:.2f}", f"{figures['page_cpu']:.1f}"]
        memory = figures["memory_mb"]
        size = [f"{figures['groups']:,}", f"{figures['former']:,}"]
        rows.append([*size, *times, *page, "-" if memory is None else f"{memory:.0f}"])
    return markdown(rows)


def _lighthouse_kill_table(control: Mapping[str, Any]) -> list[str]:
    """Return a row for each number of groups that survive a kill; empty if none was measured."""
    head = ["groups that go on"]
    for way in ("without the gate", "with it"):
        head += [f"new quorum {way} (ms)", "longest", "quorum without a change (ms)"]
    rows = [head]
    for figures in control.values():
        if "survivors" not in figures:
            continue
        row = [f"{figures['survivors']:,}"]
        for way in ("open", "gate"):
            times = figures[way]
            row += [f"{times['median']:.0f}", f"{times['longest']:.0f}", f"{times['steady']:.1f}"]
        rows.append(row)
    return markdown(rows) if len(rows) > 1 else []


def _control_time(figures: Mapping[str, Any] | None) -> str:
    return "-" if figures is None else "{median:.2f} (p90 {p90:.2f})".format(**figures)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return an aligned Markdown table; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def _spread(figures: Mapping[str, float]) -> str:
    return "{median:.3f} ({low:.3f} to {high:.3f})".format(**figures)


def _table(corner: str, columns: Mapping[str, str], rows: Mapping[str, Costs]) -> list[str]:
    """Return a table of measured figures.

    Args:
        columns: heads, and the form of the cells below; see `_cell`.
        rows: titles, and the cases of each.
    """
    body = [
        [title, *(_cell(costs, form) for form in columns.values())] for title, costs in rows.items()
    ]
    return markdown([[corner, *columns], *body])


def _cell(costs: Costs, form: str) -> str:
    """Return the spread of a figure, given its path such as `stall.seconds`; `sum NAME`; or the
    `number` of cases.
    """
    if form == "number":
        return str(len(costs))
    values = [reduce(getitem, form.removeprefix("sum ").split("."), cost) for cost in costs]
    known: list[Any] = [value for value in values if value is not None]
    if form.startswith("sum "):
        return str(sum(known))
    never = (
        f", {len(values) - len(known)} never"
        if form.startswith("rejoin") and len(known) < len(values)
        else ""
    )
    return (_spread(spread(known)) if known else "-") + never


def _kill_table(kills: Mapping[str, Costs], parts: Sequence[str]) -> list[str]:
    columns = {"kills": "number"}
    if "failure" in parts:
        columns |= {"survivors' stall (s)": "stall_seconds", "steps lost, in all": "sum steps_lost"}
    if "rejoin" in parts:
        columns |= {
            "kill to contributing (s)": "rejoin_seconds",
            "stall at the return (s)": "rejoin_stall_seconds",
        }
    return _table(
        "SIGKILL of a group", columns, {TITLES[system]: costs for system, costs in kills.items()}
    )


def _return_table(returns: Costs) -> list[str]:
    rows = {}
    for case in returns:
        ranks = "1 rank" if case["num_ranks"] == 1 else f"{case['num_ranks']} ranks"
        rows[f"{ranks} a group, {'forked' if case['forked'] else 'new processes'}"] = case["kills"]
    columns = {
        "kills": "number",
        "kill to contributing (s)": "rejoin_seconds",
        "survivors' stall (s)": "stall_seconds",
    }
    return _table(
        "SIGKILL of a group", {**columns, "at the return (s)": "rejoin_stall_seconds"}, rows
    )


def _rejoin_table(rejoins: Mapping[str, Any]) -> list[str]:
    columns = {
        "transfer (steps)": "transfer_steps",
        "steps made meanwhile": "steps_made",
        "median step / before": "step_ratio",
        "longest gap beyond a step (s)": "stall.seconds",
        "in steps": "stall.steps",
        "when it is back (s)": "return_stall.seconds",
        "updates replayed in a step": "replay_rate",
    }
    rows = {
        f"{how}, {len(rejoins[how])} times": rejoins[how]
        for how in ("replay", "wait")
        if rejoins.get(how)
    }
    return _table(f"return at {rejoins['transfer_max_mbps']:.1f} Mbit/s", columns, rows)


def _drain_table(drains: Costs) -> list[str]:
    in_order = sum(drain["in_order"] for drain in drains)
    columns = {"survivors' stall (s)": "stall.seconds", "in steps": "stall.steps"}
    columns["until it had left (s)"] = "leave_seconds"
    return _table(
        "SIGTERM to a group", columns, {f"{len(drains)} drains, {in_order} in order": drains}
    )


def _outage_table(outages: Costs) -> list[str]:
    columns = {
        "pause (s)": "stall.seconds",
        "in steps": "stall.steps",
        "lighthouse away (s)": "away_seconds",
    }
    columns["groups restarted"] = "sum num_restarts"
    return _table("SIGKILL of the lighthouse", columns, {f"{len(outages)} times": outages})


_RECOVERY_TABLES: Mapping[str, Callable[[Any], list[str]]] = {
    "returns": _return_table,
    "rejoins": _rejoin_table,
    "drains": _drain_table,
    "outages": _outage_table,
}


def _loss_table(done: Mapping[str, Any]) -> list[str]:
    """Return loss and bytes of each way to meet; those of the runs that are missing are left
    out.
    """
    heads = [
        part
        for num in NUMS_GROUPS
        for part in (f"loss, {num} groups", "to synchronous", "MB per step and group")
    ]
    rows = [[SETTINGS, *heads]]
    for case in CASES:
        if case.num_groups != NUMS_GROUPS[0]:
            continue
        title = (
            "synchronous"
            if case.outer_lr is None
            else f"rounds of {case.sync_steps}, outer LR {case.outer_lr:g}"
        )
        row = [title + ("" if case.seed == SEED else f", seed {case.seed}")]
        for num in NUMS_GROUPS:
            same = replace(case, num_groups=num)
            figures, other = done.get(same.name), done.get(same.reference)
            row += (
                ["-"] * 3
                if figures is None
                else [f"{figures['loss']:.4f}", "-", _megabytes(figures)]
            )
            if figures is not None and other is not None:
                row[-2] = f"{100 * (figures['loss'] / other['loss'] - 1):+.2f} %"
        rows.append(row)
    return markdown(rows)


def _megabytes(figures: Mapping[str, Any]) -> str:
    return f"{figures['bytes_per_step'] / 1e6:.3g}"


def _links_table(done: Mapping[str, Any]) -> list[str]:
    """Return tokens per second of each mode at each rate, and as a multiple of the synchronous
    mode's.
    """
    modes = [case for case in MODES if case.name in done]
    rows = [
        [
            "tokens/s, 2 groups",
            *("synchronous" if c.sync_steps == 1 else f"rounds of {c.sync_steps}" for c in modes),
        ]
    ]
    rates = [UNTHROTTLED, *RATES_MBPS] if modes else []
    for index, mbps in enumerate(rates):
        cells = []
        for case in modes:
            speed, usual = (
                done[c.name]["rates"][index]["tokens_per_second"] for c in (case, modes[0])
            )
            cells.append(
                f"{speed:,.0f}" + (f" ({speed / usual:.2g}x)" if case.name != modes[0].name else "")
            )
        paced = (
            f"{mbps:g} Mbit/s (measured {done['paced'][f'{mbps:g}']:.4g})"
            if mbps
            else "not throttled"
        )
        rows.append([paced, *cells])
    sizes = (done[case.name]["rates"][0]["bytes_per_exchange"] / case.sync_steps for case in modes)
    rows.append(
        ["MB per step and group, by TCP's counter", *(f"{size / 1e6:.3g}" for size in sizes)]
    )
    loads = ([rate["load"] for rate in done[case.name]["rates"]] for case in modes)
    rows.append(["load of the machine", *(f"{min(load):.1f} to {max(load):.1f}" for load in loads)])
    return markdown(rows)


def _diloco_table(done: Mapping[str, Any]) -> list[str]:
    """Return what became of each run of the two DiLoCos."""
    names = {OURS: "titan_ft", PEER: "torchtitan's own"}
    heads = [
        f"{names[name.split('-')[0]]}, {figures['kills'] or 'no'} SIGKILLs"
        for name, figures in done.items()
    ]
    length = f"{DILOCO_STEPS // DILOCO.sync_steps} rounds of {DILOCO.sync_steps} steps"
    rows = [[f"DiLoCo, 2 groups x 2 ranks, {length}", *heads]]
    texts: Mapping[str, Callable[[Any], str]] = {
        # The JSON has the victim's too: ours has validated less often by then, and so on other
        # text.
        "the survivor's loss at the end": lambda f: (
            "-" if f["loss"] is None else f"{f['loss']:.4f}"
        ),
        "rounds committed, and failed": lambda f: f"{f['rounds_committed']}, {f['rounds_failed']}",
        "steps made by the groups": lambda f: f"{f['steps_made']:g}",
        "of them thrown away": lambda f: f"{f['steps_thrown_away']:g}",
        "groups whose ranks began a round with different states": lambda f: str(f["rounds_mixed"]),
        "digests of the groups, rank by rank": lambda f: f["digests"],
        "crashes that nobody asked for": lambda f: str(f["crashes"]),
        "groups that finished": lambda f: f"{f['groups_finished']} of {NUM_GROUPS}",
        "seconds": lambda f: f"{f['seconds']:.0f}",
        "ended early": lambda f: "no" if f["ended"] is None else f["ended"],
    }
    rows += [
        [title, *(text(figures) for figures in done.values())] for title, text in texts.items()
    ]
    return markdown(rows)


_ROUNDS_TABLES: Mapping[str, Callable[[Any], list[str]]] = {
    "rounds-loss": _loss_table,
    "rounds-links": _links_table,
    "rounds-diloco": _diloco_table,
}
