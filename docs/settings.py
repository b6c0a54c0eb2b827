# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Print docs/settings.md from what `titan_ft/config.py` says of each field.

python docs/settings.py > docs/settings.md
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "titan_ft" / "config.py"
HEAD = """# Settings

The `[fault_tolerance]` table of a run's TOML; on the command line `--fault_tolerance.NAME=VALUE`. Most runs touch the
six settings of the first table only. A wrong value is refused with one line that names field, rule, value and remedy.
`titan-ft config CONFIG.toml` prints the values that a run would have.

torchtitan's own table has 13 of these fields: `enable`, `group_size`, `min_replica_size`, `process_group`,
`process_group_timeout_ms`, `replica_id`, `semi_sync_method` and six more for semi-synchronous training. They keep name,
default and meaning. A setting of an earlier version that is gone is refused by its name, with what holds instead.

This page is printed from `titan_ft/config.py`.
"""


def markdown() -> str:
    """Return docs/settings.md: a table for each part of the `[fault_tolerance]` table.

    Raises:
        ValueError: a field has no docstring.
    """
    source = CONFIG.read_text()
    headings = dict(re.findall(r"^    # (.*)()\n", source, re.MULTILINE))
    lines, parts = source.splitlines(), [HEAD]
    table = next(
        n
        for n in ast.parse(source).body
        if isinstance(n, ast.ClassDef) and n.name == "FaultTolerance"
    )
    for node, meaning in zip(table.body, [*table.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        if (above := lines[node.lineno - 3].removeprefix("    # ")) in headings:
            parts.append(
                f"\n## {above.rstrip('.')}\n\n| field | type | default | meaning |\n| --- | --- | --- | --- |"
            )
        name = ast.unparse(node.target)
        match meaning:
            case ast.Expr(value=ast.Constant(value=str(text))):
                form, default = _cell(ast.unparse(node.annotation)), _cell(_default(node))
                parts.append(
                    f'| <a id="{name}"></a>`{name}` | {form} | `{default}` | {_cell(" ".join(text.split()))} |'
                )
            case _:
                raise ValueError(f"{name} needs a docstring that says what it means")
    return "\n".join(parts) + "\n"


def _default(node: ast.AnnAssign) -> str:
    match node.value:
        case ast.Constant(value=bool(value)):
            return str(value).lower()
        case ast.Constant(value=None):
            return "not set"
        case ast.Constant(value=str(value)):
            return f'"{value}"'
        case ast.Constant(value=value):
            return str(value)
        case _:
            return "[]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
