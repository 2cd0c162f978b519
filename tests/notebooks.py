"""Runs a notebook of docs/notebooks as Jupyter would, cell by cell, in this process and this folder.

    python tests/notebooks.py NAME

A cell of `%%bash` is a process, and one in the background ends with the notebook.
"""

import json
import linecache
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def read_code(name: str) -> list[str]:
    """The sources of the cells with code."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [each["source"] for each in cells if each["cell_type"] == "code"]


def execute(source: str, module: ModuleType, title: str) -> None:
    """A cell of Python, in the module that stands for `__main__`: its source can be found, as in Jupyter."""
    linecache.cache[title] = (len(source), None, source.splitlines(True), title)
    exec(compile(source, title, "exec"), vars(module))


def main(name: str) -> None:
    """Run all cells. Raises what a cell raises, and CalledProcessError for a command that fails."""
    behind: list[subprocess.Popen[bytes]] = []
    try:
        for number, source in enumerate(read_code(name)):
            head, _, text = source.partition("\n")
            sys.stdout.write(f"--- {source}\n")
            sys.stdout.flush()
            if head.startswith("%%writefile "):
                Path(head.split()[1]).write_text(text)
            elif head == "%%bash --bg":
                behind.append(subprocess.Popen(["bash", "-c", f"exec {text}"]))
            elif head == "%%bash":
                subprocess.run(["bash", "-e", "-c", text], check=True)
            else:
                execute(source, sys.modules["__main__"], f"<cell {number}>")
    finally:
        for process in behind:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
