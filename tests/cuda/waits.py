# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Every place where titan_ft waits for a device, found in its source; and titan_ft with some of
them removed.

A wait is named by module, function and callee, such as `gradients.flight.Flight.join:wait_for`. Two
waits with the same callee in one function have numbers. A name survives every edit that keeps the
wait in its function.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "titan_ft"
_OF_DEVICE = ("synchronize", "record_event", "wait_for", "join_stream")
_RAW = ("synchronize", "wait_event", "wait_stream")
"""Functions and methods of torch; `device.py` makes its functions of them."""
_ROOMS = ("engine.", "gradients.", "membership.", "protocol.", "transfer.")
"""Of the engine: here a `wait` without a time waits for a device, but for `_NO_DEVICE`."""
_OF_ENGINE = ("_await_running_copy",)
"""Methods of the engine that let the current stream wait; each call of one is a wait by itself."""
_UNNOTICED = (
    "gradients.flight.Flight._exchange:record_event",
    "gradients.flight.Flight.join:record_event",
    "gradients.operations.Operations.end:wait",
    "gradients.flight.Flight.join:wait_for",
)
"""Waits after an exchange that broke off.

Only `join:record_event` needs a thread that was left in a launch. The other three are reached by
`train_over_broken_exchanges`, whose bytes stay the same without them. The cause is not known yet.
"""
_NO_DEVICE = ("_membership", "_work", "process", "_zygotes", "_zygote")
"""Objects whose `wait` waits for no device: for a quorum, for Gloo, for a process."""


def find_waits() -> dict[str, Path]:
    """Return the file of each wait, by its name."""
    found = {name: path for path in sorted(PACKAGE.rglob("*.py")) for name, _ in _waits_of(path)}
    return {name: path for name, path in found.items() if name not in _UNNOTICED}


def remove_waits(names: Collection[str]) -> None:
    """Remove these waits from modules of titan_ft that this process imports later.

    Raises:
        ValueError: a name is unknown, or its module is already imported.
    """
    files = find_waits()
    if missing := set(names) - set(files):
        raise ValueError(f"no such wait: {', '.join(sorted(missing))}")
    modules = {_module_of(files[name]) for name in names}
    if loaded := modules & set(sys.modules):
        raise ValueError(f"imported already: {', '.join(sorted(loaded))}")
    sys.meta_path.insert(0, _Finder(frozenset(names), modules))


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def _waits_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    return _name_waits(path, ast.parse(path.read_text(encoding="utf-8")))


def _name_waits(path: Path, tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    module = _module_of(path).removeprefix("titan_ft.")
    numbers: Counter[str] = Counter()
    for function, call in _calls_in(tree, ()):
        if not _is_wait(module, function, call):
            continue
        callee = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        name = f"{module}.{'.'.join(function)}:{callee}"
        numbers[name] += 1
        yield name if numbers[name] == 1 else f"{name}#{numbers[name]}", call


def _calls_in(
    node: ast.AST, function: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """Yield each call with the names of the classes and functions around it, in source order."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*function, child.name)
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls_in(child, inner)


def _is_wait(module: str, function: Sequence[str], call: ast.Call) -> bool:
    if module.startswith("chaos."):  # a fault that measures how long a step takes
        return False
    callee = call.func
    # In device.py itself; the event of record_time is a time, and nothing waits for it.
    if isinstance(callee, ast.Name):
        return module == "device" and callee.id in _OF_DEVICE and function[-1] != "record_time"
    if not isinstance(callee, ast.Attribute):
        return False
    owner = ast.unparse(callee.value)
    if owner == "device":
        return callee.attr in _OF_DEVICE
    if module == "device" or owner in ("torch.cuda", "torch.accelerator"):
        return callee.attr in _RAW
    if callee.attr in _OF_ENGINE:
        return True
    is_of_engine = module.startswith(_ROOMS)
    return (
        is_of_engine
        and callee.attr == "wait"
        and not call.args
        and owner.rpartition(".")[2] not in _NO_DEVICE
    )


class _Remover(ast.NodeTransformer):
    def __init__(self, calls: Collection[ast.Call]) -> None:
        self._calls = calls

    def visit_Call(self, node: ast.Call) -> Any:  # ast's name
        if node not in self._calls:
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute | ast.Name)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name == "wait":  # the operation itself stays
            return self.visit(node.func.value)  # type: ignore[union-attr]  # a method
        # It returns the current stream, whether it joins another one or not.
        if name == "join_stream":
            node.args = [ast.copy_location(ast.Constant(None), node)]
            return node
        return ast.copy_location(ast.Constant(None), node)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, path: str, names: frozenset[str]) -> None:
        super().__init__(module, path)
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        removed = [call for name, call in _name_waits(path, tree) if name in self._names]
        changed = ast.fix_missing_locations(_Remover(removed).visit(tree))
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str], modules: Collection[str]) -> None:
        self._names, self._modules = names, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._names)
        return spec
