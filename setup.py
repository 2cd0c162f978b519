"""A wheel carries the recipes: `jobs/` and `serve_apps/` as `shoal/recipes/`, and the page of one of them.

`pyproject.toml` cannot say so.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
RECIPES = ("jobs", "serve_apps", "clients/javascript")


class BuildWithRecipes(build_py):
    """Copies the package as always, and the recipes into it; an editable install uses both in place."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, "shoal")
        shutil.rmtree(package, ignore_errors=True)  # of an earlier build, files that have moved since
        super().run()
        for name in RECIPES:
            shutil.copytree(
                ROOT / name, package / "recipes" / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
            )


setup(cmdclass={"build_py": BuildWithRecipes})
