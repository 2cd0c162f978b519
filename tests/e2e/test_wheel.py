"""The wheel, built of the source distribution and installed alone: what README says works without a clone."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml

import shoal
from blocks import read_blocks
from shoal.libs.start.packaged import CLIENTS
from shoal_program import ROOT, Program

MOUNTS = yaml.safe_load((ROOT / "cluster.yaml").read_text())["file_mounts"]
# Hosts install it from these: what each has there is a file or folder here.
SOURCES = {target.removeprefix("~/shoal/"): ROOT / source for target, source in MOUNTS.items() if "~/shoal/" in target}
IGNORED = ("__pycache__", "node_modules", "shoal.egg-info")
VERBS = """
import json, sys
from shoal.cli import cli
for each in json.loads(sys.argv[1]):
    cli.main(each, standalone_mode=False)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment that has the wheel and sees the libraries of this one, but no checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a build writes beside them
    sources.mkdir()
    for name, source in SOURCES.items():
        if source.is_dir():
            shutil.copytree(source, sources / name, ignore=shutil.ignore_patterns(*IGNORED))
        else:
            shutil.copy(source, sources / name)
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m all"):
        subprocess.run(["git", *words.split()], cwd=sources, check=True, capture_output=True)
    (sources / "docs").symlink_to(ROOT / "docs")
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (archive,) = folder.glob("shoal-*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    unpacked = archive.with_suffix("").with_suffix("").rename(folder / "unpacked")
    stale = unpacked / "build/lib/shoal/old_module.py"  # of an earlier build
    stale.parent.mkdir(parents=True)
    stale.touch()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "--no-build-isolation", "-w", str(folder), str(unpacked)], check=True)
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("shoal-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", *options, str(wheel)], check=True)
    shutil.rmtree(sources)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # A plain path each: what their own .pth files name, a checkout among it, is not read.
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return folder


@pytest.fixture
def empty(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing is left."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.setenv("SHOAL_VERIFY", "0")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield folder
    assert not list(folder.iterdir())


def run(cwd: Path, *words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def list_files(folder: Path, into: str = "") -> set[str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and not {*IGNORED} & {*path.parts}]
    return {f"{into}{path.relative_to(folder)}" for path in paths}


def test_it_has_all_that_the_clone_has(installed: Path) -> None:
    (packages,) = installed.glob("venv/lib/python*/site-packages")
    expected = list_files(ROOT / "platform/shoal") | {"recipes/constraints.txt", "recipes/commit.txt"}
    for name in ("jobs", "serve_apps", "clients"):
        expected |= list_files(ROOT / name, f"recipes/{name}/")
    assert list_files(packages / "shoal") == expected
    (information,) = packages.glob("shoal-*.dist-info")
    metadata = PathDistribution(information).metadata
    assert (metadata["Version"], metadata["License-File"]) == (shoal.__version__, "LICENSE")
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "The Shoal authors")
    assert (installed / "unpacked/docs/games/godot.md").is_file()


def test_an_image_is_built_of_what_hosts_have() -> None:
    lines = re.findall(r"^COPY (.*) /", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    passed = re.findall(r"^!(.*)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert {name for line in lines for name in line.split()} == {*SOURCES} == {*passed}


def test_it_gives_what_is_used_outside_of_it(installed: Path, empty: Path, tmp_path: Path) -> None:
    program, clients = installed / "venv/bin/shoal", ROOT / "clients"
    said = run(empty, program, "--version")
    assert re.fullmatch(rf"shoal {shoal.__version__}, commit [0-9a-f]{{10}}\n", said)
    constraints = Path(run(empty, program, "where", "constraints.txt").strip())
    assert constraints.is_relative_to(installed)
    assert constraints.read_text() == (ROOT / "constraints.txt").read_text()
    kinds = ("task", "actor", "endpoint", "library")
    words = [*(["new", kind] for kind in kinds), *(["client", engine, "--out", engine] for engine in CLIENTS)]
    run(tmp_path, installed / "venv/bin/python", "-c", VERBS, json.dumps(words))
    assert [kind for kind in kinds if not [*tmp_path.glob(f"my_{kind}*")]] == []
    for engine, file in CLIENTS.items():
        assert list_files(tmp_path / engine) == list_files(clients / file.partition("/")[0])
    assert run(empty, program, "client", "godot") == (clients / CLIENTS["godot"]).read_text()


def test_the_doctor_finds_what_it_needs(installed: Path, empty: Path) -> None:
    findings = json.loads(run(empty, installed / "venv/bin/shoal", "doctor", "--json"))["findings"]
    checked = {each["check"]: each["level"] for each in findings}
    assert (checked["python"], checked["packages"], checked["imports"]) == ("ok", "ok", "ok")


def test_the_console_opens(installed: Path, empty: Path) -> None:
    with Program([str(installed / "venv/bin/shoal"), "console", "--port", "0"], cwd=empty) as program:
        address = program.wait_for_line(r"http://[\w.:]+")[0]
        with urllib.request.urlopen(address) as page:
            (script,) = re.findall(r'src="([^"]+app\.js)"', page.read().decode())
        with urllib.request.urlopen(address + script) as answer:
            assert answer.read() == (ROOT / "platform/shoal/libs/console/static/app.js").read_bytes()


def test_the_readmes_python_runs(installed: Path, empty: Path, tmp_path: Path) -> None:
    """In a process of its own, as a notebook or a script runs it: trains, serves, and leaves nothing running."""
    block, play = read_blocks("../README.md")
    compile(play, "README.md", "exec")  # a game's; the guide's is played
    (tmp_path / "readme.py").write_text(block)
    printed = run(empty, installed / "venv/bin/python", tmp_path / "readme.py")
    # Behind it Ray prints that the actor of Serve, which ends itself, has died.
    answer = next(line for line in printed.splitlines() if line.startswith("[["))
    assert float(answer.strip("[]")) == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize(
    "program", [pytest.param("shoal run table", marks=pytest.mark.soak), "python -m shoal.train task=table"]
)
def test_the_readmes_table_is_learnt(program: str, installed: Path, empty: Path, tmp_path: Path) -> None:
    table, ages = tmp_path / "customers.csv", [7 * number % 90 for number in range(100)]
    table.write_text("age,churned\n" + "".join(f"{age},{'no' if age < 50 else 'yes'}\n" for age in ages))
    words = [*program.split(), f"data={table}", "target=churned", "name=churn", "stop.epochs=2", "trees=false"]
    assert "registered churn@1" in run(empty, installed / "venv/bin" / words[0], *words[1:])
