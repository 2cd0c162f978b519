"""`python -m shoal.recipes NAME a.b=c ...`: the job NAME of the recipes, where the path of its file is not known."""

from __future__ import annotations

import runpy
import sys

from shoal.recipes import find_recipe, recipe_names

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    path = find_recipe(name)
    if path is None:
        sys.exit(f"error: {name!r} is none of the recipes {', '.join(recipe_names())}")
    sys.argv[:2] = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
