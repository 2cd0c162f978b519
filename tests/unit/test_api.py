"""What `import shoal` offers, frozen; and Tasks of a notebook as files."""

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from python_program import run_python
from shoal.errors import ConfigError
from shoal.plugins.library import find_libraries

NAMES = [
    "ActorClient",
    "AsyncClient",
    "Client",
    "Data",
    "Mean",
    "Registry",
    "Task",
    "TrainSpec",
    "__version__",
    "connect",
    "errors",
    "fit",
    "load",
    "load_run",
    "runs",
    "serve",
]


def test_the_public_names_are_these() -> None:
    assert sorted(shoal.__all__) == NAMES
    added = {name for library in find_libraries() for name in library.names}
    assert {*dir(shoal)} == {*NAMES, *added}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(shoal, name).__doc__


def test_serve_is_a_function_also_when_its_room_was_imported_before() -> None:
    program = "import shoal.serve.spec.endpoint, shoal; assert callable(shoal.serve); print(shoal.serve.spec.endpoint)"
    help_text = pydoc.render_doc(shoal.serve, renderer=pydoc.plaintext)
    assert "serve(*models: 'str', **fields: 'Any')" in help_text
    assert "`name@alias` (the endpoint follows it)" in help_text
    run_python(program)


PROGRAM = """
import json
import math as mathematics
from os.path import join as joined

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.train.task import make_task
from shoal.train.task_source import get_task_path

WIDTH = 3
x = torch.arange(8.0).reshape(8, 1)


def layers(width):
    return nn.Sequential(nn.Linear(1, width), Twice(), nn.Linear(width, 1))


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Line(shoal.Task):
    def model(self):
        assert joined("a", "b") and mathematics.pi
        return layers(WIDTH)

    def data(self):
        x = torch.arange(8.0).reshape(8, 1)
        return shoal.Data(train=TensorDataset(x, 2 * x + 1))

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()


class Uses(Line):
    def model(self):
        return nn.Linear(*widths)


class Trains(Line):
    def data(self):
        return shoal.Data(train=TensorDataset(x_of_the_program, x_of_the_program))


x_of_the_program = x
widths = (each for each in [8, 1])
"""


ENDING = """
print(get_task_path(Line))
try:
    get_task_path(Uses)
except shoal.errors.ConfigError as error:
    print(error)
word = get_task_path(Trains)
x_of_the_program = x[:5]
assert get_task_path(Trains) == word
assert len(make_task(word, {}).data().train) == 5
try:
    shoal.fit(Trains, workers=2, parallel="ddp", stop={"steps": 1})
except shoal.errors.ConfigError as error:
    print(error)
print(word)
"""


def test_a_task_of_the_running_program_becomes_a_file_that_stands_alone_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + ENDING)
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    word, refused, alone, staying = done.stdout.strip().splitlines()
    file, name = word.split(":")
    assert name == "Line"
    text = Path(file).read_text()
    assert "import math as mathematics" in text
    assert "from posixpath import join as joined" in text
    assert "WIDTH = 3" in text
    assert "json" not in text, "what the Task does not use is not written"
    assert text.index("class Twice") < text.index("def layers") < text.index("class Line")
    from shoal.train.task import make_task

    assert len(list(make_task(shoal.TrainSpec(task=word).task, {}).model().parameters())) == 4
    assert refused.startswith(
        "widths = 'generator': is used by the Task, and is a generator that only this program has"
    )
    assert refused.endswith(
        'make it above `if __name__ == "__main__":`, and call `fit` below, or put the Task into a file'
    )
    # What only methods of training use stays in the program; other processes can build the model.
    assert "workers = 2: train in other processes, which do not have x_of_the_program of this program" in alone
    task = make_task(staying, {})
    assert task.model()
    with pytest.raises(ConfigError, match="x_of_the_program = None: is an object of the program that defined the Task"):
        task.data()


def test_a_class_within_a_function_is_refused() -> None:
    from shoal.train.task_source import get_task_path

    class Inner(shoal.Task):
        pass

    with pytest.raises(ConfigError, match="is defined within a function"):
        get_task_path(Inner)


@pytest.mark.parametrize("task", [3, "no_such_file.py:Task", object])
def test_what_is_no_task_is_refused(task: object) -> None:
    with pytest.raises(ConfigError, match="task"):
        shoal.fit(task, say=None, stop={"steps": 1})


def test_a_cluster_of_other_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head.example:8265")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS = .* is a cluster of other hosts"):
        shoal.serve("line")
