# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs in the form of torchtitan 0.3: `--module M --config F`, and 0.3's flags.

`python -m titan_ft.training.module_config M F [flags]` prints the TOML of such a job.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ft.config import TABLE, ConfigError, read_flags
from titan_ft.host.release import check_torchtitan, expect_torchtitan
from titan_ft.usage import refusing

_OWN_TABLES = (TABLE, "experimental", "job")
"""Tables whose flags 0.3 does not have."""


@dataclass(frozen=True)
class ModuleFlags:
    """The flags of a worker, split by their reader.

    Attributes:
        module: M; empty if a TOML defines the job.
        function: F.
        own: flags of this package's tables.
        others: flags of 0.3.
    """

    module: str
    function: str
    own: tuple[str, ...]
    others: tuple[str, ...]


def split_flags(args: Sequence[str]) -> ModuleFlags:
    """Split the flags of a worker by their reader. A value that follows its flag stays with it.

    Raises:
        ConfigError: only one of --module and --config is given, or a TOML too.
    """
    given = {"module": "", "config": ""}
    own: list[str] = []
    others: list[str] = []
    words = iter(args)
    place = others
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.removeprefix("--")
            if name in given:
                given[name] = value if equals else next(words, "")
                continue
            table = name.partition(".")[0].replace("-", "_")
            place = own if table in _OWN_TABLES else others
        place.append(word)
    found = ModuleFlags(given["module"], given["config"], tuple(own), tuple(others))
    if bool(found.module) != bool(found.function):
        got = f"--module {found.module}" if found.module else f"--config {found.function}"
        raise ConfigError(
            f"--module and --config must come together, got {got} alone; give both, or a TOML"
        )
    if found.module and "job.config_file" in dict(read_flags(own)):
        raise ConfigError(
            f"--module must be left out with --job.config_file, got {found.module!r}; give one of "
            "the two"
        )
    return found


def read_tables(flags: ModuleFlags) -> dict[str, Any]:
    """Return the tables of the TOML that describes a job.

    Nothing may import torchtitan before this call.

    Raises:
        ConfigError: the flags have a mistake, or no TOML can describe the job.
    """
    from titan_ft.host import cpu

    cpu.prepare()
    check_torchtitan()
    with expect_torchtitan():
        from titan_ft.host.titan import read_module

    def unknown(flag: str) -> str:
        job = f"--module {flags.module} --config {flags.function}"
        return f"{flag} is no flag of {job}; correct or remove it"

    try:
        return refusing(
            lambda: read_module(flags.module, flags.function, flags.others), flags.others, unknown
        )
    except ConfigError:
        raise
    except ValueError as error:
        # torchtitan has rules of its own.
        raise ConfigError(" ".join(str(error).split())) from error


def format_toml(tables: Mapping[str, Any]) -> str:
    """Return tables as a TOML.

    Raises:
        ConfigError: a value is None. TOML has no such value, and without the field the job would
            have the default of its table.
    """
    return "\n".join(_lines(tables, "")) + "\n"


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in table.items() if key not in inner}
    if name and values:
        yield f"[{name}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_format(f'{name}.{key}', value)}"
    if values:
        yield ""
    for key, value in inner.items():
        yield from _lines(value, f"{name}.{_key(key)}" if name else _key(key))


def _format(name: str, value: Any) -> str:
    if value is None:
        raise ConfigError(
            f"{name} must have a value for a TOML, got None; give the job by the flags of a "
            "worker, or change the field by its flag"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format(name, item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_format(f'{name}.{key}', item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf, nan
    return _quote(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quote(key)


def _quote(value: Any) -> str:
    # A text or a number in JSON is valid in TOML too, except for this character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def main(args: Sequence[str]) -> int:
    """Print the TOML of a job; return the exit status."""
    if len(args) < 2:
        print(
            "usage: python -m titan_ft.training.module_config M F [flags of torchtitan 0.3]",
            file=sys.stderr,
        )
        return 2
    module, function, *others = args
    try:
        # F may print. Its output must not be in the TOML.
        with contextlib.redirect_stdout(sys.stderr):
            text = format_toml(read_tables(ModuleFlags(module, function, (), tuple(others))))
    except ConfigError as error:
        print(f"titan-ft: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
