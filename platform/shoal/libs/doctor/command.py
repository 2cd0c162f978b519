"""`shoal doctor`: whether this machine can run Shoal, and the remedy for each problem.

Every check is a function that examines one thing and returns findings; one command prints them. It changes nothing,
starts no Ray, and imports the tested modules in a separate process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Self

import click
import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shoal.cpu_count import count_usable_cores
from shoal.device_memory import read_memory_limit
from shoal.errors import ClusterError, ConfigError, format_install
from shoal.extend.cli import AsJson, print_json, verb
from shoal.extend.cluster import format_remote_remedy, haproxy_program, load_handle, require_no_shadowing, state_path
from shoal.extend.runs import WaitReporter, format_size
from shoal.home import home

GIB = 1 << 30
IMPORTS = ("numpy", "zmq", "msgspec", "safetensors", "torch", "ray", "ray.train", "ray.serve", "ray.tune")
IMPORT_TIMEOUT_S = 120.0
UNNEEDED_IMPORTS = {  # by extra
    "cluster": (),
    "train,serve": (),
    "train": ("ray.serve",),
    "serve": ("ray.train", "ray.tune"),
}


class Level(StrEnum):
    """The severity. WARN: it works, but badly or with limits. FAIL: it does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `remedy` is empty when all is well."""

    check: str
    level: Level
    detail: str
    remedy: str = ""

    @classmethod
    def grade(cls, check: str, value: float, detail: str, remedy: str, *, warn_below: float, fail_below: float) -> Self:
        """Judge an amount that should be large enough."""
        level = Level.FAIL if value < fail_below else Level.WARN if value < warn_below else Level.OK
        return cls(check, level, detail, "" if level is Level.OK else remedy)


def check_python(running: str, wanted: str) -> Finding:
    """The interpreter against `Requires-Python`."""
    if SpecifierSet(wanted).contains(running):
        return Finding("python", Level.OK, f"{running} at {sys.prefix}")
    return Finding("python", Level.FAIL, f"{running}, but Shoal needs {wanted}", "make a venv with such a Python")


def find_installed_extra(requirements: Sequence[str], installed: Callable[[str], str | None]) -> str:
    """`train`, `serve` or `train,serve` where these are installed in full and `cluster` is not, else `cluster`."""
    parsed = list(map(Requirement, requirements))
    there = (extra for extra in UNNEEDED_IMPORTS if all(installed(each.name) for each in _required(parsed, extra)))
    return next(there, "cluster")


def check_packages(
    requirements: Sequence[str], installed: Callable[[str], str | None], extra: str = "cluster"
) -> Finding:
    """The installed packages against those that the extra needs, and their versions against its ranges."""
    needed, problems = list(_required(list(map(Requirement, requirements)), extra)), []
    for requirement in needed:
        version = installed(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is installed, {requirement.specifier} is needed")
    if problems:
        return Finding("packages", Level.FAIL, "; ".join(dict.fromkeys(problems)), format_install(extra))
    return Finding("packages", Level.OK, f"{len(needed)} fit what the extra {extra!r} needs")


def _required(requirements: Sequence[Requirement], extra: str) -> Iterator[Requirement]:
    """The requirements of the package and its extra (or several, `a,b`), including those of extras that these name."""
    extras = extra.split(",")
    for requirement in requirements:
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": each}) for each in extras):
            continue
        if requirement.name != "shoal":
            yield requirement
            continue
        of_extras = [each for each in requirements if "extra" in str(each.marker)]
        for other in sorted(requirement.extras):
            yield from _required(of_extras, other)


def check_imports(modules: Sequence[str], extra: str = "cluster") -> Finding:
    """Import the modules, in this order, in a new process in the current folder."""
    program = "".join(f"print({module!r}, flush=True)\nimport {module}\n" for module in modules)
    command = [sys.executable, "-W", "ignore", "-c", program]
    try:
        with WaitReporter("importing the packages"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as late:
        module = ((late.stdout or b"").decode().split() or ["python"])[-1]  # bytes, whatever `text` says
        detail = f"import {module}: not done after {IMPORT_TIMEOUT_S:g} s"
        return Finding("imports", Level.FAIL, detail, "try again when the machine and its disk are idle")
    if done.returncode == 0:
        return Finding("imports", Level.OK, ", ".join(modules))
    module = (done.stdout.split() or ["python"])[-1]
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Finding("imports", Level.FAIL, f"import {module}: {reason}", format_install(extra))


def check_text_engines() -> Finding:
    """What computes the texts of language models in this environment."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    other = "vllm (text.engine=vllm)" if has_vllm else "no vllm: text.engine_python names an environment that has it"
    return Finding("text engines", Level.OK, f"slots, {other}")


def check_cores(num_cores: int) -> Finding:
    """The CPUs that this process may use."""
    remedy = "a job and its Ray services share one core: give the container more"
    return Finding.grade("cores", num_cores, f"{num_cores}", remedy, warn_below=2, fail_below=1)


def check_memory(total_bytes: int, limit_bytes: int | None, available_bytes: int) -> Finding:
    """The machine's memory, the control group's limit if there is one, and the free part."""
    usable = min(total_bytes, limit_bytes or total_bytes)
    limited = f", limited to {format_size(limit_bytes)}" if limit_bytes and limit_bytes < total_bytes else ""
    free = min(available_bytes, usable)
    detail = f"{format_size(total_bytes)}{limited}, {format_size(free)} available"
    remedy = "Ray alone takes about 1.5 GiB: end something, or raise the limit"
    return Finding.grade("memory", free, detail, remedy, warn_below=4 * GIB, fail_below=GIB)


def check_home() -> Finding:
    """The folder of all durable files, which is created if missing."""
    try:
        return Finding("home", Level.OK, f"{home()}")
    except ConfigError as error:
        return Finding("home", Level.FAIL, f"{error.field} = {error.value} {error.problem}", error.remedy)


def check_disk(folder: Path, what: str) -> Finding:
    """The free space of the disk that holds `folder`; Ray refuses to spill objects to a disk that is 95 % full."""
    usage = shutil.disk_usage(folder)
    detail = f"{format_size(usage.free)} free in {folder} ({what})"
    remedy = f"make room on the disk of {folder}"
    finding = Finding.grade("disk", usage.free, detail, remedy, warn_below=5 * GIB, fail_below=GIB)
    if finding.level is Level.OK and usage.free < 0.05 * usage.total:
        return Finding("disk", Level.WARN, f"{detail}, more than 95 % full", remedy)
    return finding


def check_shared_memory(folder: Path) -> Finding:
    """Ray's object store is in /dev/shm; if that is too small, Ray uses the disk."""
    if not folder.exists():
        return Finding("shared memory", Level.WARN, f"there is no {folder}", "objects will lie on the disk: mount it")
    total = shutil.disk_usage(folder).total
    remedy = "objects will lie on the disk: start the container with --shm-size=4g"
    detail = f"{format_size(total)} in {folder}"
    return Finding.grade("shared memory", total, detail, remedy, warn_below=2 * GIB, fail_below=0)


def check_loopback() -> Finding:
    """A server and a client on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2.0):
            return Finding("loopback", Level.OK, "ports can be bound and reached on 127.0.0.1")
    except OSError as error:
        remedy = "allow this process to use the loopback interface"
        return Finding("loopback", Level.FAIL, f"127.0.0.1: {error}", remedy)


def check_open_files(soft_limit: int) -> Finding:
    """Each Ray process holds dozens of files and connections."""
    detail = f"at most {soft_limit}"
    return Finding.grade("open files", soft_limit, detail, "ulimit -n 65536", warn_below=4096, fail_below=512)


def check_haproxy() -> Finding:
    """The HAProxy that endpoints need: present and working. Training does not need it."""
    try:
        command = [haproxy_program(), "-v"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        remedy = f"on Linux {format_install('serve')}; training needs none"
        return Finding("haproxy", Level.WARN, f"endpoints have no front: {error}", remedy)
    return Finding("haproxy", Level.OK, f"{done.stdout.splitlines()[0].split(' - ')[0]}, {command[0]}")


def check_curve() -> Finding:
    """Encryption of gateways, which is required beyond this machine."""
    import zmq

    if zmq.has("curve"):
        return Finding("encryption", Level.OK, f"ZeroMQ {zmq.zmq_version()} has CURVE")
    remedy = "pip install --force-reinstall pyzmq: its wheels have CURVE"
    return Finding("encryption", Level.WARN, "this ZeroMQ has no CURVE: gateways on loopback only", remedy)


def check_tokens(folder: Path) -> Finding:
    """Only their owner can read the token files."""
    for path in (folder / "token", folder / "ray-token"):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            remedy = f"chmod 600 {path}; if it got out, delete it"
            return Finding("tokens", Level.WARN, f"others may read {path}", remedy)
    return Finding("tokens", Level.OK, f"private to their owner, in {folder}")


def check_cluster(path: Path, environment: Mapping[str, str]) -> Finding:
    """The cluster that `shoal run` would use."""
    asked = environment.get("RAY_API_SERVER_ADDRESS") or environment.get("RAY_ADDRESS")
    if asked:
        remedy = "unset RAY_ADDRESS RAY_API_SERVER_ADDRESS, if that is not meant"
        return Finding("cluster", Level.WARN, f"the environment sends jobs to {asked}", remedy)
    try:
        cluster = load_handle(path)
    except ClusterError as error:
        return Finding("cluster", Level.WARN, str(error), f"rm {path}")
    if cluster is None:
        return Finding("cluster", Level.OK, "none is up; `shoal run` starts one of its own")
    if not cluster.is_on_this_host:
        detail = f"{path} speaks of a cluster on {cluster.host}"
        return Finding("cluster", Level.WARN, detail, format_remote_remedy(cluster, path))
    if not cluster.is_head_alive():
        return Finding("cluster", Level.WARN, f"{path} speaks of a cluster that has died", "shoal down")
    return Finding("cluster", Level.OK, f"up, {cluster.dashboard_url}")


def check_shadowing(folders: Sequence[Path]) -> Finding:
    """No module hides one of Python's own, such as a stray platform/__init__.py."""
    for folder in folders:
        try:
            require_no_shadowing(folder)
        except ConfigError as error:
            return Finding("imports", Level.FAIL, f"{folder} {error.problem}", error.remedy)
    return Finding("imports", Level.OK, "nothing hides a module of Python's own")


def run_checks() -> Iterator[Finding]:
    """Every finding about this machine, the slow ones last; where packages are missing, that alone."""
    import resource

    root = Path(__file__).parents[4]  # of a checkout; of a plain install, possibly the standard library's folder
    folders = [root, Path.cwd()] if (root / "pyproject.toml").exists() else [Path.cwd()]
    memory = psutil.virtual_memory()
    yield check_python(".".join(map(str, sys.version_info[:3])), metadata("shoal")["Requires-Python"])
    extra = find_installed_extra(requires("shoal") or [], _find_installed_version)
    yield (packages := check_packages(requires("shoal") or [], _find_installed_version, extra))
    if packages.level is Level.FAIL:
        return  # without them other checks would fail for no other reason
    yield check_shadowing(list(dict.fromkeys(folders)))
    yield check_text_engines()
    yield check_cores(count_usable_cores())
    yield check_memory(memory.total, read_memory_limit(), memory.available)
    finding = check_home()
    yield finding
    has_home = finding.level is Level.OK
    if has_home:
        yield check_disk(home(), "runs and models")
    yield check_disk(Path("/tmp"), "Ray's files")
    yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_loopback()
    if extra != "train":
        yield check_haproxy()
    yield check_curve()
    if has_home:
        yield check_tokens(home())
        yield check_cluster(state_path(), os.environ)
    yield check_imports([module for module in IMPORTS if module not in UNNEEDED_IMPORTS[extra]], extra)


def _find_installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@verb(
    epilog="""\b
examples:
  shoal doctor
  shoal doctor --json"""
)
def doctor(*, as_json: AsJson = False) -> Iterator[str]:
    """Check this machine and show the remedy for each problem. Exits with status 1 if something will not work."""
    findings: list[Finding] = []
    for finding in run_checks():
        findings.append(finding)
        if not as_json:
            colour = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}[finding.level]
            level = click.style(finding.level.value.ljust(4), fg=colour)
            yield f"{level}  {finding.check.ljust(13)}  {finding.detail}"
            if finding.remedy:
                yield f"{'':21}{finding.remedy}"
    num_failed = sum(finding.level is Level.FAIL for finding in findings)
    if as_json:
        print_json({"ok": num_failed == 0, "findings": [asdict(finding) for finding in findings]})
    elif num_failed:
        yield click.style(f"{num_failed} of {len(findings)} checks failed", fg="red")
    sys.exit(1 if num_failed else 0)
