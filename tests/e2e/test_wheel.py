"""The wheel, as a user has it: installed alone, in an empty folder, it has the recipes and trains one."""

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shoal_program import Program

ROOT = Path(__file__).resolve().parents[2]
MOUNTS = yaml.safe_load((ROOT / "cluster.yaml").read_text())["file_mounts"]
SOURCES = [source for target, source in MOUNTS.items() if target.startswith("~/shoal/")]  # hosts install it from these


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which sees the libraries of this one, but no checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a build writes beside them
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(ROOT / name, sources)
    stale = sources / "build/lib/shoal/old_module.py"  # of an earlier build
    stale.parent.mkdir(parents=True)
    stale.touch()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "--no-build-isolation", "-w", str(folder), str(sources)], check=True)
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("shoal-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", *options, str(wheel)], check=True)
    shutil.rmtree(sources)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # A plain path each: what their own .pth files name, a checkout among it, is not read.
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return python.parent


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield folder
    assert not list(folder.iterdir())


def test_it_has_the_package_its_data_the_recipes_and_the_licence(installed: Path, empty: Path) -> None:
    code = """
import importlib.metadata, shoal, shoal.recipes
from pathlib import Path
package = Path(shoal.__file__).parent
for place in ("py.typed", "libs/console/static/report.js", "libs/grpc/inference.proto", "old_module.py"):
    print((package / place).exists(), end=" ")
print(shoal.recipes.recipe_folder("jobs").relative_to(package), shoal.recipes.recipe_names())
print(sorted(path.name for path in shoal.recipes.recipe_folder("serve_apps").glob("*.yaml")))
metadata = importlib.metadata.metadata("shoal")
print(metadata["License-Expression"], metadata["Author"], metadata["License-File"])
"""
    done = subprocess.run([installed / "python", "-c", code], capture_output=True, text=True, cwd=empty)
    assert done.stderr == ""
    jobs, apps = (
        sorted((ROOT / name).glob(f"*.{ending}")) for name, ending in (("jobs", "py"), ("serve_apps", "yaml"))
    )
    assert done.stdout.splitlines() == [
        f"True True True False recipes/jobs {[path.stem for path in jobs]}",
        f"{[path.name for path in apps]}",
        "Apache-2.0 The Shoal authors LICENSE",
    ]


@pytest.mark.soak
def test_it_trains_a_recipe_in_an_empty_folder(installed: Path, empty: Path) -> None:
    words = [str(installed / "shoal"), "run", "lenet", "stop.steps=3", "batch_size=32"]
    with Program(words, cwd=empty) as program:
        assert program.wait() == 0
    assert "registered fashion@1" in program.said
