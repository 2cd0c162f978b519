"""Compiles a source against `kernels/` for this CPU, once: libraries are stored in the home's folder.

Their names are hashes of the sources, the options, the compiler and the CPU. Called by `LaneNetwork`. The compiler is
$CXX, else g++ or clang++ of the PATH.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from shoal.atomic_file import make_folder
from shoal.home import file_lock, home
from shoal.libs.population.engines.engine import EngineMisfit

KERNELS = Path(__file__).parent / "kernels"
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 600


def load_kernels(source: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a source, compiled where this machine has none yet. Its calls release the GIL.

    options: of the compiler, after the usual ones. Raises EngineMisfit without a compiler, or where it fails.
    """
    compiler = find_compiler()
    options = (*OPTIONS, *options)
    parts = [source, *(path.read_text() for path in sorted(KERNELS.glob("*.hpp"))), *compiler, *options, _cpu()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = home() / "kernels"
    path = folder / f"{name}.so"
    make_folder(folder)
    with file_lock(folder / "compile.lock", 2 * COMPILE_TIMEOUT_S):  # threads and processes need the same one
        if not path.exists():
            _compile(source, [*compiler, *options], path)
    return ctypes.CDLL(str(path))


def find_compiler() -> list[str]:
    """Return its command. Raises EngineMisfit without one."""
    if given := os.environ.get("CXX"):
        command = shlex.split(given)
        if not shutil.which(command[0]):
            raise EngineMisfit(f"cannot be lanes because CXX = {given!r} is no program")
        return command
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise EngineMisfit("cannot be lanes because there is no C++ compiler: install g++, or set CXX")


def _compile(source: str, command: list[str], path: Path) -> None:
    """Compile to a draft that then takes the library's name: a reader sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, "kernels.so")
        arguments = [*command, "-w", "-I", str(KERNELS), "-x", "c++", "-", "-o", str(draft)]
        done = subprocess.run(arguments, input=source, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise EngineMisfit(f"cannot be lanes because the compiler failed: {' '.join(command)}: {lines[:1]}")
        os.replace(draft, path)


@cache
def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kinds = ("model name", "flags", "Features", "CPU part", "cpu family", "model")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in kinds}))
