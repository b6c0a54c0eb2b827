# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The schema of events: its document is current, no other module knows its names, and each event is
emitted.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.event_builder import build, event
from titan_ft.run import events
from titan_ft.run.events import Event, Hung, RankEvent, kinds

ROOT = Path(__file__).parents[2]
KINDS = [kind for kind in kinds() if kind.__module__ == events.__name__]
NAMES = {str(kind.__struct_config__.tag): kind for kind in KINDS}


@functools.cache
def sources() -> list[tuple[Path, ast.Module]]:
    """Return the product's modules, but for the schema."""
    paths = sorted([*(ROOT / "titan_ft").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
    return [
        (path.relative_to(ROOT), ast.parse(path.read_text()))
        for path in paths
        if path != Path(events.__file__)
    ]


def test_document_is_current() -> None:
    """docs/events.md is the schema's output, by the command that it names."""
    command = [sys.executable, "-m", "titan_ft.run.events"]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert process.returncode == 0
    assert process.stdout == (ROOT / "docs" / "events.md").read_text(), (
        f"python {' '.join(command[1:])} > docs/events.md"
    )


def test_document_has_every_event_and_field() -> None:
    """Each event has a heading, and each of its own fields a row there."""
    text = (ROOT / "docs" / "events.md").read_text()
    for name, kind in NAMES.items():
        section = text.partition(f"### `{name}`\n")[2].partition("\n##")[0]
        assert section, name
        told = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        assert told == set(kind.__struct_fields__) - set(Event.__struct_fields__), name


def test_field_that_nobody_describes_is_refused() -> None:
    """Each field has a comment with its meaning."""

    class Untold(Hung, kw_only=True):
        """An event of a test."""

        pounds: float  # its weight
        grams: float

    with pytest.raises(ValueError, match=r"Untold\.grams needs a comment that says what it means"):
        events._rows(Untold)


def test_event_derived_from_an_event_hides_none() -> None:
    """A program may derive an event from another one; both are read."""

    class Stuck(Hung, kw_only=True):
        """Derived from an event that is emitted."""

    assert {Hung, Stuck} <= set(kinds())
    assert Hung in set(kinds(RankEvent))
    assert not set(events.ABSTRACT) & set(kinds())


FAULTS_OF_THAT_NAME = {"link_dead"}


def test_nobody_else_spells_a_name() -> None:
    """No module spells an event's name, or the field that holds it. They use classes, in which a
    typo shows.

    A name of one word may mean something else, such as a state: it is no offence.
    """
    found = []
    for path, tree in sources():
        keys = [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
        keys += [
            argument
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            for argument in node.args[:1]
        ]
        found += [
            f"{path}:{key.lineno} event"
            for key in keys
            if isinstance(key, ast.Constant) and key.value == "event"
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value.decode() if isinstance(node.value, bytes) else node.value
                spelt = "_" in text and text in NAMES and text not in FAULTS_OF_THAT_NAME
                found += [f"{path}:{node.lineno} {text}"] if spelt or '"event"' in text else []
    found += [
        f"{path.relative_to(ROOT)} {name}"
        for path in sorted((ROOT / "scripts").glob("*.sh"))
        for name in NAMES
        if "_" in name and re.search(rf"\b{name}\b", path.read_text())
    ]
    assert not found


def test_every_event_has_an_emitter() -> None:
    """Each class is instantiated somewhere in the product, or the schema is wider than the
    program.
    """
    made = {
        node.func.id if isinstance(node.func, ast.Name) else ""
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    made |= {"Straggler", "StragglerRecovered"}  # by a name for either
    assert {kind.__name__ for kind in KINDS} <= made


def test_schema_imports_nothing_of_the_project() -> None:
    """What all processes share stands below everything."""
    for path in sorted((ROOT / "titan_ft" / "run").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("titan_ft"):
                below = ("titan_ft.run", "titan_ft.system")
                assert str(node.module).startswith(below), f"{path.name} imports {node.module}"


def test_builder_refuses_what_the_schema_has_not() -> None:
    """A test that spells a name or a field wrongly, or gives another type, fails instead of testing
    nothing.
    """
    assert build(Hung, time=2.0) == Hung(
        time=2.0, mono=2.0, pid=1, replica=0, rank=0, attempt=0, step=0
    )
    with pytest.raises(ValueError, match="'hanged' must be the name of an event"):
        event("hanged")
    with pytest.raises(ValueError, match="Hung must have the field steps"):
        event("hung", steps=3)
    with pytest.raises(ValueError, match=r"Hung\.step must be of type .*int.*, got 'x'"):
        event("hung", step="x")
    with pytest.raises(ValueError, match="Batches must have the field first"):
        event("step_committed", data={"first": 1})


def test_a_mistake_is_known_by_its_code_and_not_by_words() -> None:
    """A user's exception may begin with any words."""
    mistake = event(
        "worker_exited", code=2, error="ConfigError: x must be y", error_kind="ConfigError"
    )
    assert mistake.is_mistake
    assert not event(
        "worker_exited", code=2, error="ConfigError: of mine", error_kind="MyError"
    ).is_mistake
    gave_up = event("replica_gave_up", cause="config", error="ConfigError: x must be y")
    assert gave_up.mistake == "x must be y"


@pytest.mark.parametrize(
    ("name", "fields", "severity"),
    [
        ("worker_exited", {"signal": "SIGKILL"}, "failure"),
        ("worker_exited", {"signal": "SIGKILL", "stopped": True}, "notice"),
        ("worker_exited", {"code": 0}, "notice"),
        ("replica_gave_up", {}, "failure"),
        ("group_lost", {}, "failure"),
        ("checkpoint_saved", {}, "notice"),
        ("fault_injected", {}, "chaos"),
        ("launch_finished", {"code": 1}, "failure"),
        ("launch_finished", {"code": 130, "signal": "SIGINT"}, "notice"),
        ("launch_finished", {"reason": "all groups failed or not"}, "notice"),
    ],
)
def test_an_event_says_how_it_is_to_be_taken(
    name: str, fields: dict[str, object], severity: str
) -> None:
    assert event(name, **fields).severity == severity
