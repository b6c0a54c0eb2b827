# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft check`: verify the promises of a run from its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from titan_ft.cli.read_record import read_record
from titan_ft.config import ConfigError, check_folder
from titan_ft.history.batches.audit import Audit, audit
from titan_ft.history.batches.reread import Reread
from titan_ft.history.check import check, make_check_table, nothing_known
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import show
from titan_ft.options import Check


def run(command: Check, worker_args: Sequence[str]) -> int:
    """Print the verdicts; return 0 if every promise that was asked for holds, else 1."""
    check_folder("RUN_DIR", command.run_dir)
    if command.against is not None:
        check_folder("--against", command.against)
    try:
        record = read_record(command.run_dir, whole=command.reread)
        against = None if command.against is None else read_record(command.against)
    except ConfigError:
        raise
    except ValueError as error:
        # A damaged history proves nothing, neither that a promise holds nor that it does not.
        if not command.json:
            print(f"verdict: unknown: {error}")
            return 1
        verdicts = nothing_known(str(error))
        audited = Audit(unknown=[str(error)])
    else:
        again = _reread(record, command.run_dir) if command.reread else None
        verdicts = check(record, against, again)
        audited = audit(record)
        if again is not None:
            audited = again.apply(audited)
    if command.json:
        print(json.dumps(verdicts.to_dict() | {"audit": audited.to_dict()}, indent=2))
    else:
        show(make_check_table(verdicts))
    return verdicts.exit_status


def _reread(record: RunRecord, run_dir: Path) -> Reread:
    """Read the data of a run again.

    The result is unknown if the data or the config can no longer be read.
    """
    # Imported here: reading data loads torch and torchtitan, which takes seconds.
    from titan_ft.training.checkpoint.reread import reread

    try:
        return reread(record, run_dir)
    except Exception as error:  # noqa: BLE001  # the user's loader may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Reread(unknown=[f"the data cannot be read again: {text}"])
