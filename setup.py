"""What `pyproject.toml` cannot say: a wheel carries the recipes, the clients of engines and the constraints, in
`shoal/recipes/`, and says of which commit it is; so does a source distribution, at its top.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
FOLDERS = ("jobs", "serve_apps", "clients")
COMMIT = "commit.txt"


def find_commit() -> str:
    """The commit of this clone; of a source distribution the one that it has recorded."""
    if (ROOT / COMMIT).exists():
        return (ROOT / COMMIT).read_text()
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    describe = ["git", "describe", "--always", "--dirty= (changed)", "--abbrev=10", "--exclude=*"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


class BuildWithRecipes(build_py):
    """Copies the package as always, and the rest into it; an editable install uses all in place."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, "shoal")
        shutil.rmtree(package, ignore_errors=True)  # of an earlier build, files that have moved since
        super().run()
        recipes = package / "recipes"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, recipes / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        shutil.copy(ROOT / "constraints.txt", recipes)
        (recipes / COMMIT).write_text(find_commit())


class RecordCommit(sdist):
    """A source distribution has no repository to ask."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        Path(base_dir, COMMIT).write_text(find_commit())


setup(cmdclass={"build_py": BuildWithRecipes, "sdist": RecordCommit})
