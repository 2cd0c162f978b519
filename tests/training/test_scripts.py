"""Scripts and notebooks as people write them: each trains, registers, and its version is loaded where none of it is."""

import json
from pathlib import Path

import pytest

import shoal.runs
from python_program import run_python

HEAD = "import shoal, torch\nfrom torch import nn\n"
TASK = """

class Line(shoal.Task):
    def model(self):
        return {model}

    def data(self):
        return shoal.Data(train=[(torch.tensor([i / 64]), torch.tensor([i / 32])) for i in range(64)])

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()


"""
FIT = 'shoal.fit(Line, name="NAME", stop={"steps": 2}, batch_size=32, threads=1, say=None)'
GUARD = 'if __name__ == "__main__":\n    '
OWN = "class Twice(nn.Module):\n    def forward(self, x):\n        return 2 * x\n\n\n"
TABLE = 'NETS = {"linear": nn.Linear, "wide": lambda *size: nn.Linear(*size, bias=False)}\n'
REGISTRY = OWN + "NETS = {}\nfor kind in (Twice, nn.Tanh):\n    NETS[kind.__name__] = kind\n"
CONFIG = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    hidden: int = 3\n\nCONFIG = Config(4)\n"
PARSER = 'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--hidden", type=int)\n'
PLACES = """import enum, logging, re
from functools import partial
from pathlib import Path
HERE = Path(__file__).parent
log, WORD, device = logging.getLogger(__name__), re.compile("[0-9]+"), torch.device("cpu")
class Size(enum.Enum):
    SMALL = 3
net, size = partial(nn.Linear, 1), Size.SMALL
"""
READ = "int(WORD.findall((HERE / 'width.txt').read_text())[0])"
USES_PLACES = f"nn.Sequential(net(size.value), nn.Linear({READ}, 1, device=device))"
WIDTH_OF = "nn.Sequential(nn.Linear(1, {0}), nn.Linear({0}, 1))"
# By name: the files of a folder, of which main.py is run, or the package `pack`.
SHAPES = {
    "table": {"main.py": HEAD + TABLE + TASK.format(model='NETS["wide"](1, 1)') + GUARD + FIT},
    "table-without-guard": {
        "main.py": HEAD + REGISTRY + TASK.format(model='nn.Sequential(NETS["Twice"](), nn.Linear(1, 1))') + FIT
    },
    "dataclass": {"main.py": HEAD + CONFIG + TASK.format(model=WIDTH_OF.format("CONFIG.hidden")) + GUARD + FIT},
    "dataclass-without-guard": {
        "main.py": HEAD + CONFIG + TASK.format(model=WIDTH_OF.format("CONFIG.hidden")) + "result = " + FIT
    },
    "arguments": {
        "main.py": HEAD
        + PARSER
        + "args = parser.parse_args()\n"
        + TASK.format(model=WIDTH_OF.format("args.hidden"))
        + GUARD
        + FIT
    },
    "arguments-in-main": {
        "main.py": HEAD
        + PARSER
        + TASK.format(model=WIDTH_OF.format("args.hidden"))
        + "def main():\n    global args\n    args = parser.parse_args()\n    "
        + FIT
        + "\n\n\n"
        + GUARD
        + "main()"
    },
    "arguments-below-the-guard": {
        "main.py": HEAD
        + TASK.format(model=WIDTH_OF.format("args.hidden"))
        + GUARD
        + (PARSER + "args = parser.parse_args()\n").replace("\n", "\n    ")
        + FIT
    },
    "module-beside": {
        "main.py": HEAD + "from nets import make\n" + TASK.format(model="make()") + GUARD + FIT,
        "nets.py": "from torch import nn\n\n\ndef make():\n    return nn.Linear(1, 1)\n",
    },
    "relative-imports": {
        "pack/__init__.py": "",
        "pack/train.py": HEAD + "from .nets import make\n" + TASK.format(model="make()") + GUARD + FIT,
        "pack/nets.py": "from torch import nn\n\n\ndef make():\n    return nn.Linear(1, 1, bias=False)\n",
    },
    "package": {
        "pack/__init__.py": "SIZE = (1, 1)",
        "pack/__main__.py": HEAD + "from . import SIZE\n" + TASK.format(model="nn.Linear(*SIZE)") + GUARD + FIT,
    },
    "notebook": {"cell": HEAD + REGISTRY + TASK.format(model='nn.Sequential(NETS["Twice"](), nn.Linear(1, 1))') + FIT},
    "places": {"width.txt": "3", "main.py": HEAD + PLACES + TASK.format(model=USES_PLACES) + GUARD + FIT},
    "places-without-guard": {"width.txt": "3", "main.py": HEAD + PLACES + TASK.format(model=USES_PLACES) + FIT},
    "two-fits": {
        "main.py": HEAD
        + TASK.format(model="nn.Linear(1, 1)")
        + FIT.replace("NAME", "first")
        + "\nprint(NETS_OF_NOBODY := 3)\nclass Again(Line):\n    pass\n"
        + FIT.replace("Line", "Again")
    },
}
RUN = """
import json, linecache, os, runpy, sys, types
import matplotlib.pyplot, torch._dynamo  # once, not in each of them
import shoal.train.launch.champion_score, shoal.train.launch.local, shoal.libs.console
import shoal, torch

def run(name, files):
    os.chdir(name)
    sys.path[0], sys.argv = os.getcwd(), ["main.py", *(["--hidden", "5"] if "arguments" in name else [])]
    if "cell" in files:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        linecache.cache["<cell>"] = (len(files["cell"]), None, files["cell"].splitlines(True), "<cell>")
        exec(compile(files["cell"], "<cell>", "exec"), vars(main))
    elif "main.py" in files:
        runpy.run_path(os.path.abspath("main.py"), run_name="__main__")
    else:
        runpy._run_module_as_main("pack.train" if "pack/train.py" in files else "pack", alter_argv=False)
    print("ANSWER", name, float(shoal.load(name).predict(torch.ones(2, 1).numpy())["output"][0, 0]), flush=True)

shapes = json.loads(sys.stdin.read())
for name, files in shapes.items():
    if (child := os.fork()) == 0:
        run(name, files)
        os._exit(0)
    assert not os.waitpid(child, 0)[1], name
"""
LOAD = """
import sys
import numpy, shoal
for name in sys.argv[1:]:
    print("ANSWER", name, float(shoal.load(name).predict(numpy.ones((2, 1), numpy.float32))["output"][0, 0]))
"""


def find_answers(program: str, folder: Path, *arguments: str, given: str = "") -> dict[str, float]:
    said = run_python(program, *arguments, cwd=folder, input=given)
    lines = [line.split() for line in said.splitlines() if line.startswith("ANSWER")]
    assert lines, said
    return {name: float(answer) for _, name, answer in lines}


@pytest.mark.soak
def test_a_script_of_any_shape_is_loaded_where_it_is_not(tmp_path: Path) -> None:
    shapes = {
        name: {file: text.replace("NAME", name) for file, text in files.items()} for name, files in SHAPES.items()
    }
    for name, files in shapes.items():
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    trained = find_answers(RUN, tmp_path, given=json.dumps(shapes))
    assert sorted(trained) == sorted(shapes)
    num_runs = len(shoal.runs.list_runs(100))
    for name in shapes:
        for file in sorted((tmp_path / name).rglob("*.py")):
            file.write_text("raise RuntimeError('what is registered needs no file')\n")
    (tmp_path / "elsewhere").mkdir()
    assert find_answers(LOAD, tmp_path / "elsewhere", *shapes) == trained
    assert len(shoal.runs.list_runs(100)) == num_runs, "to load a version trains nothing"
