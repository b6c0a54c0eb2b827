# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the docs name is there: files, classes, functions, fields, links; what is printed is
current.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from titan_ft.cli.command_line import parse
from titan_ft.cli.main import main
from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import FAULTS, list_params
from titan_ft.faults.fault import Need

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "kubernetes/README.md",
    "tests/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
RESULTS = tuple(
    f"benchmarks/results/{path.name}" for path in sorted((ROOT / "benchmarks/results").glob("*.md"))
)
PRINTED = (("docs/settings.py", "docs/settings.md"),)
_REQUIRED = ("--replicas", "2", "--ranks-per-replica", "1", "--run-dir", "DIR")
_PARSERS = {
    "scripts/explore.sh": "tests/simulation/explore.py",
    "scripts/bench.py": "benchmarks/command.py",
}
_RENAMED = {
    "scripts/lighthouse.sh": "lighthouse",
    "scripts/replica_group.sh": "group",
    "slurm/submit.sh": "slurm submit",
}
_SOURCES = ("titan_ft", "tests", "scripts", "benchmarks", "kubernetes", "slurm")
_WORD = r"[A-Za-z_]\w*"


@cache
def _files() -> frozenset[str]:
    """Return the paths of all files and folders of the sources, below the repository's root."""
    paths = (
        path
        for folder in _SOURCES
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts
    )
    return frozenset(
        f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}" for path in paths
    )


@cache
def _known() -> frozenset[str]:
    """Return every name that the sources define, assign, import or use, and the strings that are
    names.
    """
    names: set[str] = set()
    for folder in _SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.ClassDef() | ast.FunctionDef():
                        names.add(node.name)
                    case ast.Name():
                        names.add(node.id)
                    case ast.Attribute():
                        names.add(node.attr)
                    case ast.arg() | ast.keyword() if node.arg:
                        names.add(node.arg)
                    case ast.alias():
                        names.update(node.name.split("."))
                    case ast.Constant() if isinstance(node.value, str):
                        names.add(node.value)
    return frozenset(names)


def _quoted(page: str) -> Iterator[str]:
    """Yield what a page says in backticks, without its blocks of code."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def _stands(quoted: str) -> bool:
    """Tell whether a file or a name that is quoted exists; what is neither is not looked at."""
    if re.fullmatch(r"[\w./-]+\.(py|sh|md|toml|txt|yaml)", quoted):
        return (ROOT / quoted).exists() or any(path.endswith(f"/{quoted}") for path in _files())
    if re.fullmatch(r"[\w.-]+/([\w.-]+/)*", quoted):
        return (ROOT / quoted).is_dir() or any(path.endswith(f"/{quoted}") for path in _files())
    # A metric: its name begins with the project's.
    quoted = re.sub(r"^titan_ft_(\w+?)(_info|_total)?$", r"\1", quoted)
    called = re.match(rf"({_WORD}(?:\.{_WORD})*)(?:\(.*)?$", quoted)
    if called is None or quoted.startswith(("torch.", "torchft.")):
        return True
    return all(part in _known() for part in called[1].split("."))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    """A file, a class, a method, a field that a page names exists in the sources."""
    gone = sorted({quoted for quoted in _quoted(page) if not _stands(quoted)})
    assert gone == []


def test_a_name_that_is_gone_is_noticed() -> None:
    """A renamed function, a moved file: both are found missing."""
    assert _stands("Rounds.make")
    assert not _stands("Rounds.fabricate_nothing")
    assert not _stands("replica/never_there.py")


def _commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command that a page's blocks of bash hold."""
    for block in re.findall(
        r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    ):
        for line in block.replace("\\\n", " ").splitlines():
            # What may be left out, and the environment.
            line = re.sub(r"\[[^]:]*\]|^\w+=\S* ", "", line)
            line = re.sub(r"--module \w+ --config \w+", "CONFIG.toml", line)
            line = line.replace("CONFIG.toml", "llama3_debug").replace(
                " ... ", f" {' '.join(_REQUIRED)} "
            )
            yield list(
                itertools.takewhile(
                    lambda word: word not in ("&&", "|"), shlex.split(line, comments=True)
                )
            )


def _complaint(words: list[str]) -> str:
    """Return what is wrong with a command of this project, by the parser that it meets; nothing of
    other commands.
    """
    end = words.index("--") if "--" in words else len(words)
    flags = [word.partition("=")[0] for word in words[end + 1 :] if word.startswith("--")]
    if unknown := [flag for flag in flags if not re.fullmatch(r"--\w+\.\w+", flag)]:
        return f"no flags of torchtitan: {unknown}"
    match words[:end]:
        case ["titan-ft", *own]:
            try:
                parse(own)
            except ConfigError as error:
                return str(error)
            except SystemExit:  # it prints its help
                return ""
        case ["bash", script, *options] if script in _RENAMED:
            return _complaint(["titan-ft", *_RENAMED[script].split(), *options])
        case ["bash" | "python", script, *options]:
            known = {
                "--help",
                *re.findall(r"--[\w-]+", (ROOT / _PARSERS.get(script, script)).read_text()),
            }
            unknown = [
                word for word in options if re.fullmatch(r"--[\w-]+", word) and word not in known
            ]
            return f"no options of {script}: {unknown}" if unknown else ""
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page: str) -> None:
    """Each command that a page shows has the options, and for `titan-ft` the values, that there
    are.
    """
    assert not [complaint for words in _commands(page) if (complaint := _complaint(words))]


@pytest.mark.parametrize(
    "command",
    [
        "titan-ft launch CONFIG.toml --replica 2",
        "titan-ft launch CONFIG.toml --replicas two",
        "titan-ft topp DIR",
        "bash scripts/campaign.sh --minute 3",
        "titan-ft launch CONFIG.toml -- --steps=3",
    ],
)
def test_a_command_that_is_wrong_is_noticed(command: str) -> None:
    """An option, a value, a command, a flag."""
    assert _complaint(command.split())


def _section(page: str, title: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_command_is_listed_with_what_runs_it() -> None:
    """None is missing, none is left over."""
    table = _section("tests/README.md", "The commands of the docs")
    rows = re.findall(r"^\| `(.*)` \| (.+) \|$", table, re.MULTILINE)
    listed = [command.replace("\\|", "|") for command, _ in rows]
    shown = set()
    for page in PAGES:
        for block in re.findall(
            r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
        ):
            for line in block.replace("\\\n", " ").splitlines():
                shown.add(" ".join(re.sub(r"\s#.*$", "", line).split()))
    assert sorted(listed) == sorted(shown - {""})


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """A file that a page links to exists, and so does the heading in it."""
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        path, _, heading = target.partition("#")
        if not path.startswith("http"):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            text = file.read_text() if heading else ""
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not heading or heading in anchors.union(re.findall(r'<a id="(\w+)">', text)), (
                target
            )


@pytest.mark.parametrize(("script", "page"), PRINTED)
def test_what_is_printed_is_current(script: str, page: str) -> None:
    """The settings' page is what its script prints."""
    printed = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed == (ROOT / page).read_text(), f"run: python {script} > {page}"


def test_every_environment_variable_is_listed() -> None:
    """The table has each variable of this project that the package or a script reads, and no other
    one.
    """
    page = (
        (ROOT / "docs/operations.md")
        .read_text()
        .partition("## Environment variables")[2]
        .partition("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"TITAN_FT_[A-Z_]+", row)}
    files = [ROOT / path.removeprefix("/") for path in _files() if not path.startswith("/tests/")]
    texts = [
        path.read_text() for path in files if path.suffix in (".py", ".sh", ".sbatch", ".yaml")
    ]
    used = {name for text in texts for name in re.findall(r"\bTITAN_FT_[A-Z_]*[A-Z]\b", text)}
    # Read by the jobs of tests.
    assert listed == used - {"TITAN_FT_TEST_HOOKS", "TITAN_FT_TEST_PROCESS_GROUP"}


def _shown() -> dict[str, dict[str, str]]:
    """Return the rows of tests/README.md that say what shows what, by the title of their table."""
    section = _section("tests/README.md", "What shows what")
    tables: dict[str, dict[str, str]] = {}
    for first, second in re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE):
        if second == "shown by":
            rows = tables[first] = {}
        elif set(first) != {"-"}:
            rows[first.strip("`")] = second.strip("`")
    return tables


def _functions_of(file: str) -> set[str]:
    nodes = ast.parse((ROOT / "tests" / file).read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_each_promise_and_fault_has_a_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row for all that is judged and all that can be injected, and each row names a
    test.
    """
    header = {"time": 1.0, "mono": 1.0, "pid": 1}
    started = {
        "event": "launch_started",
        **header,
        "replicas": 1,
        "ranks_per_replica": 1,
        "spares": 0,
        "job_id": "a",
    }
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "launcher-1.jsonl").write_text(f"{json.dumps(started)}\n")
    main(["check", str(tmp_path), "--json"])
    judged = {each["name"] for each in json.loads(capsys.readouterr().out)["judgements"]}
    tables = _shown()
    assert judged
    assert judged <= tables["promise"].keys()
    assert tables["fault"].keys() == set(FAULTS)
    for test in (test for rows in tables.values() for test in rows.values()):
        file, _, name = test.partition("::")
        assert name in _functions_of(file), test


def test_the_faults_are_listed() -> None:
    """docs/chaos.md has the row of each fault as its class says it, in the order of `titan-ft chaos
    --list`.
    """
    rows = []
    for name, fault in FAULTS.items():
        params = ", ".join(
            f"`{param}` {'drawn' if value == 'random' else value}"
            for param, value in list_params(fault)
        )
        needs = ", ".join(need.label for need in Need if need in fault.needs)
        rows.append(f"| `{name}` | {fault.summary()} | {params} | {needs} |")
    page = (ROOT / "docs/chaos.md").read_text()
    listed = [
        line for line in page.partition("## The faults")[2].splitlines() if line.startswith("| `")
    ]
    assert listed == rows
    assert f"{len(rows)} kinds" in page


def _plain(text: str) -> str:
    return " ".join(text.replace("**", "").split())


def test_the_page_of_a_package_index_stands_alone() -> None:
    """The text that a wheel carries works without the sources, and says nothing that the README
    does not.

    An index shows no file of the repository: a relative link or picture, also one by reference or
        in HTML, is broken.
    """
    (name,) = re.findall(r'^readme = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    page, readme = (ROOT / name).read_text(), (ROOT / "README.md").read_text()
    targets = re.findall(
        r"""\]\(([^)]+)\)|^\[[^]]+\]: *(\S+)|(?:src|href)=["']?([^"'\s>]+)""", page, re.MULTILINE
    )
    assert targets
    assert all("".join(target).startswith("https://") for target in targets)
    assert _plain(page.split("\n\n")[1]) in _plain(readme)
    assert all(words in list(_commands("README.md")) for words in _commands(name))
    rows = [line for line in page.splitlines() if re.match(r"\| [a-z]", line)]
    assert rows
    assert all(row in readme for row in rows)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "docs").rglob("*.py")), ids=lambda path: path.name
)
def test_scripts_of_the_docs_find_what_they_import(script: Path) -> None:
    """No test draws the pictures anew, so a renamed function would be missing only then."""
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("titan_ft"):
            continue
        module = importlib.import_module(str(node.module))
        for name in node.names:
            assert hasattr(module, name.name), f"{node.module}.{name.name}"
