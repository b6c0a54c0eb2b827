# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Build the stand-ins for NVIDIA's libraries: `bash build.sh VENV [OUT]`; VENV has torch's CUDA
build.

torch's libraries name the functions that they need from NVIDIA's. The sources in `src/` define
those that a run depends on. This script writes an empty function for each of the rest, because
torch would not load without them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "src"
_COMPILE = ["g++", "-std=c++20", "-fPIC", "-Wall", f"-I{_SOURCES}"]
_LIBRARY_FLAGS = ["-O1", "-g1"]
# Without optimization and debug information, because the operators only call torch's own code,
# and their compilation is most of the build's time.
_OPERATOR_FLAGS = ["-O0", "-g0"]

_CUDA_NOT_SUPPORTED = 801
_NCCL_INTERNAL_ERROR = 3


@dataclass(frozen=True)
class Library:
    """A stand-in for one of NVIDIA's libraries."""

    soname: str
    # The symbol version that torch's references name; None where NVIDIA's library has no versions.
    version: str | None
    # torch's references without a version belong to the library that has their prefix.
    prefixes: tuple[str, ...]
    sources: tuple[str, ...] = ()
    # The result of each function that no source defines.
    stub_result: int = 0


_RUNTIME = (
    "cuda/copy",
    "cuda/device",
    "cuda/entry_points",
    "cuda/errors",
    "cuda/event",
    "cuda/host_wait",
    "cuda/launch",
    "cuda/memory",
    "cuda/stream",
    "cuda/unmodelled",
)
_NCCL = (
    "nccl/collectives",
    "nccl/communicator",
    "nccl/data_type",
    "nccl/group",
    "nccl/point_to_point",
    "nccl/transport",
)
_LIBRARIES = (
    Library("libcudart.so.13", "libcudart.so.13", ("cuda",), _RUNTIME),
    Library("libcublas.so.13", "libcublas.so.13", ("cublas",), ("math/cublas",)),
    Library("libcublasLt.so.13", "libcublasLt.so.13", ("cublasLt",), ("math/cublasLt",)),
    Library("libcudnn.so.9", "libcudnn.so.9", ("cudnn",), ("math/cudnn",)),
    Library("libcufft.so.12", "libcufft.so.12", ("cufft",)),
    Library("libcusparse.so.12", "libcusparse.so.12", ("cusparse",)),
    Library("libcusolver.so.12", "libcusolver.so.12", ("cusolver",)),
    Library("libcurand.so.10", "libcurand.so.10", ("curand",)),
    Library("libcupti.so.13", "libcupti.so.13", ("cupti",)),
    Library("libnvrtc.so.13", "libnvrtc.so.13", ("nvrtc",)),
    Library("libnvshmem_host.so.3", "NVSHMEM", ("nvshmem", "nvshmemx", "nvshmemi")),
    Library("libcusparseLt.so.0", None, ("cusparseLt",)),
    Library("libcufile.so.0", None, ("cuFile",)),
    Library("libcuda.so.1", None, ("cu",), ("cuda/driver",), stub_result=_CUDA_NOT_SUPPORTED),
    Library("libnvidia-ml.so.1", None, ("nvml",), ("cuda/nvml",)),
    Library("libnccl.so.2", None, ("nccl",), _NCCL, stub_result=_NCCL_INTERNAL_ERROR),
)
_OPERATORS = (
    "operators/cpu_view",
    "operators/cuda_only",
    "operators/install",
    "operators/operator",
    "operators/random",
)
_OPERATORS_LIBRARY = "libstand_in_ops.so"


class BuildError(Exception):
    """A problem that the user has to solve, in one line."""


def _run(command: list[str], **options: object) -> str:
    """Run a command and return its output. A failure ends the build with its error output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _require_tools() -> None:
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise BuildError(
                f"the stand-in for CUDA cannot be built: {tool} is missing (Debian: apt-get install g++)"
            )
    probe = subprocess.run(
        [*_COMPILE, "-x", "c++", "-fsyntax-only", "-"], input="#include <concepts>", text=True
    )
    if probe.returncode != 0:
        raise BuildError(
            "the stand-in for CUDA cannot be built: this g++ has no C++20; install g++ 11 or later"
        )


def _find_torch(venv: Path) -> Path:
    for folder in sorted(venv.glob("lib/python3*/site-packages/torch")):
        return folder
    raise BuildError(
        f"{venv} has no torch; install the CUDA build with pip install --no-deps torch"
    )


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()


def _read_all(paths: Iterable[Path]) -> list[str]:
    parts = []
    for path in paths:
        parts += [path.name, path.read_text()]
    return parts


@dataclass(frozen=True)
class Reference:
    """A function that one of torch's libraries needs from another library."""

    name: str
    version: str


def _references(torch: Path) -> set[Reference]:
    found = set()
    for library in sorted(torch.glob("lib/*.so*")):
        for line in _run(
            ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)]
        ).splitlines():
            name, _, version = line.split()[-1].partition("@")
            found.add(Reference(name, version.lstrip("@")))
    return found


def _belongs(reference: Reference, library: Library) -> bool:
    if reference.version:
        return reference.version == library.version
    return re.match(f"(?:{'|'.join(library.prefixes)})[A-Z_]", reference.name) is not None


class Build:
    """Build steps that are skipped if the content of their inputs has not changed."""

    def __init__(self, torch: Path, out: Path) -> None:
        self._torch = torch
        self._out = out
        self._objects = out / "obj"
        self._headers = _digest(*_read_all(sorted(_SOURCES.rglob("*.h"))), str(torch))

    def run(self) -> None:
        self._objects.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The operators take longest, so they start first.
            operators = [
                pool.submit(self._compile, name, self._operator_flags()) for name in _OPERATORS
            ]
            names = [name for library in _LIBRARIES for name in library.sources]
            objects = dict(zip(names, pool.map(self._compile, names), strict=True))
            references = _references(self._torch)

            def link(library: Library) -> None:
                self._link_library(library, [objects[name] for name in library.sources], references)

            list(pool.map(link, _LIBRARIES))
            self._link_operators([future.result() for future in operators])

    def _operator_flags(self) -> list[str]:
        include = self._torch / "include"
        return [
            *_OPERATOR_FLAGS,
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch/csrc/api/include"),
        ]

    def _compile(self, name: str, flags: list[str] = _LIBRARY_FLAGS) -> Path:
        source = _SOURCES / f"{name}.cpp"
        command = [*_COMPILE, *flags, "-c", str(source), "-o"]
        return self._make(
            self._objects / f"{name.replace('/', '.')}.o",
            command,
            source.read_text(),
            self._headers,
        )

    def _link_library(
        self, library: Library, objects: list[Path], references: set[Reference]
    ) -> None:
        defined = set()
        for path in objects:
            defined |= {
                line.split()[-1] for line in _run(["nm", "--defined-only", str(path)]).splitlines()
            }
        wanted = {reference.name for reference in references if _belongs(reference, library)}
        stubs = "".join(
            f'extern "C" int {name}() {{ return {library.stub_result}; }}\n'
            for name in sorted(wanted - defined)
        )
        versions = f"{library.version or ''} {{ global: *; }};\n"
        stub_source = self._objects / f"{library.soname}.cpp"
        stub_source.write_text(stubs)
        version_script = self._objects / f"{library.soname}.map"
        version_script.write_text(versions)
        stub_object = self._make(
            self._objects / f"{library.soname}.o",
            [*_COMPILE, "-w", "-O1", "-c", str(stub_source), "-o"],
            stubs,
        )
        link = [
            "g++",
            "-shared",
            *map(str, objects),
            str(stub_object),
            f"-Wl,-soname,{library.soname}",
        ]
        link += [f"-Wl,--version-script={version_script}", "-lpthread", "-ldl", "-o"]
        self._make(
            self._out / library.soname,
            link,
            versions,
            *(path.read_bytes() for path in (*objects, stub_object)),
        )

    def _link_operators(self, objects: list[Path]) -> None:
        link = [
            "g++",
            "-shared",
            *map(str, objects),
            f"-L{self._torch / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
        ]
        link += [f"-L{self._out}", "-l:libcudart.so.13", "-o"]
        self._make(self._out / _OPERATORS_LIBRARY, link, *(path.read_bytes() for path in objects))

    def _make(self, target: Path, command: list[str], *inputs: str | bytes) -> Path:
        """Run the command, which ends with the target's path, unless its inputs are unchanged."""
        stamp = self._objects / f"{target.name}.stamp"
        digest = _digest(*command, *inputs)
        if target.exists() and stamp.exists() and stamp.read_text() == digest:
            return target
        # Not in place: a process that runs has the old library mapped, and would run changed code.
        fresh = self._objects / f"{target.name}.new"
        _run([*command, str(fresh)])
        fresh.replace(target)
        stamp.write_text(digest)
        return target


def _build(venv: Path, out: Path) -> None:
    torch = _find_torch(venv)
    sources = sorted(path for path in _SOURCES.rglob("*") if path.is_file())
    whole = _digest(
        str(torch),
        (torch / "version.py").read_text(),
        Path(__file__).read_text(),
        *_read_all(sources),
    )
    stamp = out / "stamp"
    if stamp.exists() and stamp.read_text() == whole:
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == whole:
            return
        _require_tools()
        Build(torch, out).run()
        stamp.write_text(whole)


def main() -> int:
    venv = Path(sys.argv[1]).resolve()
    out = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else _HERE / "lib"
    try:
        _build(venv, out)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
