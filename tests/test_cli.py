# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the command line shows when nothing is wrong: help, versions, a dry run, a resolved
config.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
import yaml

from titan_ft.cli.command_line import example_of, parse, read_options
from titan_ft.cli.main import main
from titan_ft.cli.read_record import read_record
from titan_ft.cluster.group import find_ranks_per_node
from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.data.assets import find_config
from titan_ft.history.record.run_record import RunRecord
from titan_ft.options import COMMANDS

ROOT = Path(__file__).parents[1]


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its first sentence."""
    assert main(["--help"]) == 0
    shown = re.findall(r"^  (\w+(?: \w+)?)  +\S", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names values by what they are, not by their type, and has an example that would be
    accepted.
    """
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "None" not in shown
    assert "PATH" not in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80  # the first one is breakable between options
    command = COMMANDS[name]
    example = example_of(command)
    assert " ".join(shown.split()).count(f"Example: {example}") == 1
    words = example.partition(" -- ")[0].split()
    own = name.split()
    assert words[: 1 + len(own)] == ["titan-ft", *own]
    assert isinstance(parse(words[1:]), command)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_also_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`titan-ft help launch` is `titan-ft launch --help`."""
    shown = []
    for words in (["help", *name.split()], [*name.split(), "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, for nothing was done."""
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: titan-ft COMMAND" in printed.err
    assert main(["help"]) == 0
    assert capsys.readouterr().out == printed.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all commands, by all names of an option."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    missing = [word for name in COMMANDS for word in name.split() if word not in script]
    options = [
        option
        for command in COMMANDS.values()
        for option in read_options(command)
        if option.name.startswith("--")
    ]
    missing += [
        name for option in options for name in option.names if name.removeprefix("--") not in script
    ]
    assert missing == []


def test_bash_completes(tmp_path: Path) -> None:
    """What a shell offers after the script was read: the commands, then the options of one."""
    script = subprocess.run(
        [sys.executable, "-m", "titan_ft", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (tmp_path / "complete").write_text(script.stdout)
    ask = """source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); function=$(complete -p titan-ft)
    function=${function##*-F }; "${function%% *}"; echo "${COMPREPLY[@]}" """
    offered = []
    for words in (["titan-ft", "la"], ["titan-ft", "launch", "--nproc"]):
        command = ["bash", "-c", ask, "bash", str(tmp_path / "complete"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        offered.append(done.stdout.split())
    assert offered == [["launch"], ["--nproc-per-node"]]


@pytest.mark.parametrize(
    "words",
    [
        "--replicas 2 --ranks-per-replica 3",
        "--groups=2 --nproc_per_node=3",
        "--replicas=2 --ranks-per-group 3",
        "--groups 2 --ranks-per-node 3",
    ],
)
def test_one_option_has_the_same_names_everywhere(words: str) -> None:
    """Ours, and those of torchrun and of a cluster's scripts, with = or a space, CONFIG as an
    option, too.
    """
    for config in (["llama3_debug"], ["--config", "llama3_debug"], ["--config=llama3_debug"]):
        launch = parse(["launch", "--run-dir", "run", *words.split(), *config])
        assert (launch.config, launch.replicas, launch.ranks_per_replica) == (
            Path("llama3_debug"),
            2,
            3,
        )
        group = parse(
            ["group", *config, "--run-dir=run", "--group", "1", "--nnodes=1", *words.split()]
        )
        ranks = find_ranks_per_node(group.ranks_per_node, group.ranks_per_replica, 1)
        assert (group.config, group.replica, group.replicas, ranks) == (
            Path("llama3_debug"),
            1,
            2,
            3,
        )


def test_two_names_of_an_option_must_not_contradict_each_other() -> None:
    """The last one would be taken without a word."""
    words = [
        "launch",
        "llama3_debug",
        "--run-dir",
        "run",
        "--ranks-per-replica",
        "1",
        "--replicas",
        "2",
    ]
    with pytest.raises(
        ConfigError,
        match=r"--groups must be the same as --replicas \(2\), got 3; give one of the two",
    ):
        parse([*words, "--groups=3"])
    assert parse([*words, "--groups=2"]).replicas == 2
    assert parse([*words, "--replicas=3"]).replicas == 3  # a script's own value, replaced


def test_commands_of_a_cluster_load_no_torch(tmp_path: Path) -> None:
    """A dry run of a group is there in moments."""
    code = (
        "import sys; from titan_ft.cli.main import main\n"
        "words = 'group llama3_debug --replica 0 --ranks-per-node 1 --lighthouse http://[::1]:1 --dry-run --run-dir'\n"
        f"assert main([*words.split(), '{tmp_path}']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours, and those of what it stands on."""
    assert main([option]) == 0
    assert re.fullmatch(
        r"titan-ft \d\S* \(torchtitan 0\.2\.2, torchft 0\.2\.0, torch 2\.\S+\)\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("shown", ["--help", "launch --help"])
def test_a_reader_that_has_seen_enough(shown: str) -> None:
    """`titan-ft ... | head` is no traceback."""
    command = [sys.executable, "-m", "titan_ft", *shown.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()  # type: ignore[union-attr]
    assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 1)  # type: ignore[union-attr]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("command", ["--help", "check --help", "chaos --list"])
def test_output_that_cannot_be_written(command: str) -> None:
    """What a command prints is its work: a full disk below it is one line, and status 2."""
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "titan_ft", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(
        "titan-ft: the output must go where it can be written, got an error of its disk (No space"
    )


def test_dry_run_says_what_would_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups, ports, folders, environment and the workers' command; no file, no process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    flags = (
        "--replicas 2 --ranks-per-replica 1 --run-dir run --lighthouse-port 4711 --chaos every_15s"
    )
    flags += " --dry-run --link-gbps 50"
    assert main(["launch", "llama3_debug", *flags.split(), "--", "--training.steps=3"]) == 0
    shown = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    for part in (
        f"run folder   {tmp_path}/run",
        "groups       2 x 1 ranks, 0 spares",
        "lighthouse   http://127.0.0.1:4711\n",
        "faults       every_15s, seed ",
        "model        llama3 debugmodel, 6,163,712 parameters\n",
        "ranks        2 in all; a group is one rank\n",
        "batch        2 sequences of a group (2 x 1 ranks that read data x 1 microbatches), 4 in all\n",
        "tokens       1,024 per step (4 x 256), 3,072 in 3 steps\n",
        "GPU memory   94.05 MiB for each rank: parameters 23.51 MiB, gradients 23.51 MiB, optimizer 47.03 MiB\n",
        "copy of the state 70.54 MiB, buckets of the exchange 23.51 MiB\n",
        "and 23.51 MiB for each update that it queues while it heals, in half of what is free then, ",
        "a step moves 23.51 MiB of each rank's gradients: 23.51 MiB out and in (a ring of 2)\n",
        "a heal moves 70.54 MiB for each rank, 70.54 MiB for the group\n",
        "links        50 Gbit/s from rank to rank between groups, 200 between GPU and host",
        "titan_ft lighthouse --bind 127.0.0.1:4711",
        "-m titan_ft.train --job.config_file=",
        "--fault_tolerance.replica_id=1 --fault_tolerance.group_size=2",
        "TORCHFT_LIGHTHOUSE=http://127.0.0.1:4711",
        f"{tmp_path}/run/logs/replica-1/attempt-0/rank-*.log",
    ):
        assert part in shown
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", shown) == ["4", "5"]
    assert shown.count("--training.steps=3") == 2


@pytest.mark.parametrize(("donors", "seconds"), [("8", "2"), ("2", "3"), ("1", "5.9")])
def test_dry_run_of_throttled_donors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    donors: str,
    seconds: str,
) -> None:
    """A joiner gets 592 Mbit from three others at most, each of which sends 100 Mbit/s."""
    monkeypatch.chdir(tmp_path)
    command = "launch llama3_debug --replicas 4 --ranks-per-replica 1 --run-dir run --dry-run"
    settings = (f"heal_donors={donors}", "transfer_max_mbps=100")
    assert (
        main([*command.split(), "--", *(f"--fault_tolerance.{setting}" for setting in settings)])
        == 0
    )
    assert f"in which the donors stand still; {seconds} s of transfer," in capsys.readouterr().out


def test_dry_run_of_a_bounded_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound takes the place of the size of each update."""
    monkeypatch.chdir(tmp_path)
    command = "launch llama3_debug --replicas 4 --ranks-per-replica 1 --run-dir run --dry-run"
    assert main([*command.split(), "--", "--fault_tolerance.catch_up_max_gb=1.5"]) == 0
    shown = capsys.readouterr().out
    assert "queue of updates while it heals 1.50 GiB" in shown
    assert "for each update that it queues" not in shown


def test_dry_run_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a semi-synchronous method: bytes per round and per step, the anchors, and what a heal
    moves besides.
    """
    monkeypatch.chdir(tmp_path)
    command = (
        "launch llama3_debug_diloco --replicas 4 --ranks-per-replica 1 --run-dir run --dry-run"
    )
    assert main([*command.split(), "--", "--training.steps=25"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "tokens       2,048 per step (8 x 256), 51,200 in 25 steps\n",
        "rounds       3 of 10 steps, the last of 5\n",
        "copy of the state 94.05 MiB, anchors and changes 47.03 MiB, outer momentum 23.51 MiB, buckets of the",
        # A ring of 4 sends each byte 1.5 times.
        "a round moves 23.51 MiB of each rank's changes: 35.27 MiB out and in (a ring of 4), 3.53 MiB for each of its ",
        "and the outer optimizer on the host, in which training stands still\n",
        "a heal moves 94.05 MiB for each rank, 94.05 MiB for the group\n",
        f"--join-timeout-ms {24 * 3600 * 1000}",  # nobody goes on without a group in the midst of a round
    ):
        assert part in shown
    assert "a step moves" not in shown
    assert "what rounding leaves" not in shown
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_fragments_in_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of 4 groups sends 1 byte and 1/64 of each value of a half to 3 others, and holds what
    rounding leaves.
    """
    monkeypatch.chdir(tmp_path)
    command = (
        "launch llama3_debug_diloco --replicas 4 --ranks-per-replica 1 --run-dir run --dry-run"
    )
    names = ("should_quantize", "num_fragments=2", "fragment_sync_delay=3")
    assert main([*command.split(), "--", *(f"--fault_tolerance.{name}" for name in names)]) == 0
    shown = capsys.readouterr().out
    assert (
        "a round moves 11.76 MiB of each rank's changes: 8.96 MiB out and in (a ring of 4, in 8 bits), "
        in shown
    )
    assert "1.79 MiB for each of its 5 steps\n" in shown
    assert "in which training stands still, but for the transfer, beside 3 steps\n" in shown
    assert "buckets of the exchange 23.51 MiB, what rounding leaves 47.03 MiB\n" in shown


def test_dry_run_of_a_job_for_other_hosts_needs_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a recipe's first lines say: its sizes, on a host that has neither the GPUs nor the
    tokenizer.
    """
    monkeypatch.chdir(tmp_path)
    command = "launch llama3_1b --replicas 30 --ranks-per-replica 10 --run-dir run --dry-run"
    assert main(command.split()) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for part in (
        "tokenizer    ./assets/hf/Llama-3.2-1B, which this host does not have and the job's must\n",
        "ranks        300 in all; a group is FSDP 10\n",
        "batch        10 sequences of a group (1 x 10 ranks that read data x 1 microbatches), 300 in all\n",
        # 1,498,482,688 parameters x 4 bytes / 10 ranks are 571.6 MiB; the first ranks' shards are a
        # row longer.
        "GPU memory   2.24 GiB for each rank: parameters 572.18 MiB, gradients 572.18 MiB, optimizer 1.12 GiB\n",
    ):
        assert part in printed.out
    assert "titan_ft://tokenizer" not in printed.out
    assert list(tmp_path.iterdir()) == []


def test_config_shows_every_field_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is TOML, with flags and --replicas in it, and says which fields are not their
    default.
    """
    monkeypatch.chdir(tmp_path)  # a name needs no source tree around it
    assert main(["config", "llama3_debug", "--replicas", "4", "--", "--training.steps=3"]) == 0
    shown = capsys.readouterr().out
    values = tomli.loads(shown)
    table = values["fault_tolerance"]
    assert {*table, "semi_sync_method"} == set(FaultTolerance.__dataclass_fields__)
    assert (table["enable"], table["group_size"], values["training"]["steps"]) == (True, 4, 3)
    assert "group_size = 4  # default 0\n" in shown
    assert "\nheartbeat_timeout_ms = 500\n" in shown
    assert list(tmp_path.iterdir()) == []


def test_config_without_fault_tolerance_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules about a table that is not used are not asked, and that is not silent."""
    monkeypatch.chdir(tmp_path)
    assert main(["config", "llama3_debug", "--", "--fault_tolerance.no_enable"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("# fault_tolerance.enable is false: this is plain torchtitan")
    assert second == "[fault_tolerance]"


def test_check_json_holds_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What became of the batches is part of the check; a damaged history tells nothing of them, nor
    of the run.
    """
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text("{damaged\n", encoding="utf-8")
    assert main(["check", str(tmp_path), "--json"]) == 1
    checked = json.loads(capsys.readouterr().out)
    assert checked["verdict"] == checked["audit"]["verdict"] == "unknown"
    assert (checked["outcome"], checked["colour"]) == (None, "amber")
    assert all(
        "must be a JSON object" in judgement["unknown"][0] for judgement in checked["judgements"]
    )


@pytest.mark.parametrize("command", [["check"], ["check", "--json"], ["report"]])
def test_a_folder_without_events(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was run there: one sentence, and the status of a mistake in the usage."""
    assert main([*command, str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "has no events" in told.err


def test_the_dashboard_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """As Grafana imports it."""
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["panels"]
    assert main(["dashboard", "--alerts"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["groups"]


def test_a_path_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's own is taken, also where it is called like a packaged one."""
    monkeypatch.chdir(tmp_path)
    assert find_config(Path("llama3_debug.toml")).is_file()
    Path("llama3_debug.toml").touch()
    assert find_config(Path("llama3_debug.toml")) == Path("llama3_debug.toml")


def test_a_wheel_has_what_the_commands_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs, batch scripts, manifests, the dashboard: as setuptools reads pyproject.toml and the
    tree.
    """
    from setuptools import Distribution
    from setuptools.config.pyprojecttoml import apply_configuration

    monkeypatch.chdir(ROOT)
    wheel = Distribution({"script_name": "setup.py"})
    apply_configuration(wheel, "pyproject.toml")
    wheel.set_defaults()
    build = wheel.get_command_obj("build_py")
    build.ensure_finalized()  # type: ignore[attr-defined]
    packed = {
        Path(folder, name) for _, folder, _, names in build._get_data_files() for name in names
    }  # type: ignore[attr-defined]
    configs = ROOT / "configs"
    wanted = {Path("titan_ft/configs", path.relative_to(configs)) for path in configs.rglob("*.*")}
    assert {path for path in packed if "configs" in path.parts} == wanted
    for folder in ("cluster/batch", "cluster/manifests"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / "titan_ft" / folder).iterdir()}
        assert len(wanted) > 2
        assert wanted <= packed
    assert {Path("titan_ft/live/grafana.json"), Path("titan_ft/live/alerts.yml")} <= packed


@pytest.mark.parametrize("name", ["tyro", "titan_ft.live.top"])
def test_ctrl_c_during_imports_is_no_traceback(name: str, tmp_path: Path) -> None:
    """Who changes his mind at once gets the prompt, with the status of Ctrl-C; also in the midst of
    imports.
    """
    # A finder of modules that is interrupted in the midst of one of the imports, as a person may do
    # at 0.4 s.
    code = (
        "import runpy, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {name!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['titan-ft', 'top', sys.argv[1]]\n"
        "runpy.run_module('titan_ft', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_while_a_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Of a long run it took a quarter of the time; afterwards it is on again, also after a folder
    without events.
    """
    seen = []

    def read(folder: Path, *, whole: bool) -> SimpleNamespace:
        seen.append(gc.isenabled())
        return SimpleNamespace(events=[] if fails else [folder])

    monkeypatch.setattr(RunRecord, "read", read)
    with pytest.raises(ConfigError) if fails else contextlib.nullcontext():
        read_record(tmp_path)
    assert seen == [False]
    assert gc.isenabled()
