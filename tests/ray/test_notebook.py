"""A notebook trains, serves, connects and learns, in any order, in one process that stays as it was."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

import os
import subprocess
import sys
from pathlib import Path

import pytest

# As a kernel does: one event loop, which runs in the main thread while a cell is executed in `__main__`.
KERNEL = '''
import asyncio, linecache, os, pickle, signal, sys, tempfile
from pathlib import Path

import gymnasium, numpy, psutil, torch

import shoal
from rl_setting import TOKEN, serving
from shoal.cluster.ports import find_free_port
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, experience_spec

CELLS = {
    "define": """
class Line(shoal.Task):
    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return shoal.Data(train=[(torch.tensor([i / 100]), torch.tensor([i / 50])) for i in range(100)])

    def loss(self, outputs, batch):
        return ((outputs - batch[1]) ** 2).mean()

served = 0
spec = RLSpec(env="CartPole-v1")
spaces = gymnasium.make(spec.env)
experience = experience_spec(spaces.observation_space, spaces.action_space, spec)
""",
    "fit": 'shoal.fit(Line, stop={"steps": 2}, threads=1, say=None)',
    "fit2": 'shoal.fit(Line, stop={"steps": 2}, workers=2)',
    "serve": """
served += 1
fields = {"port": find_free_port(), "grpc_port": 0} if served % 2 == 0 else {}
try:
    with shoal.serve("line", **fields) as endpoint:
        with endpoint.client() as client:
            assert client.infer("line", [[0.5]])["output"].shape == (1, 1)
        endpoint.close()
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
""",
    "connect": """
with serving() as parts:
    actor = shoal.connect(parts.address, token=TOKEN)
    actor.act(numpy.zeros(4, numpy.float32))
    actor.close()
""",
    "loop": """
with tempfile.TemporaryDirectory() as folder, LocalLoop(spec, experience, Path(folder) / "run", "a secret") as loop:
    assert loop.address
""",
}


def execute(name):
    linecache.cache[f"<{name}>"] = (len(CELLS[name]), None, CELLS[name].splitlines(True), f"<{name}>")
    exec(compile(CELLS[name], f"<{name}>", "exec"), globals())


def describe_process():
    ray_settings = sys.modules.get("ray._private.ray_constants")
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(),
        "random": [torch.get_rng_state().sum(), pickle.dumps(numpy.random.get_state())],
        "settings": ray_settings is None or ray_settings.ENABLE_RAY_CLUSTER,
        "children": psutil.Process().children(),
    }


async def main():
    execute("define")
    execute("fit")
    before = describe_process()
    for name in sys.argv[1:]:
        print(f"-- {name}", flush=True)
        execute(name)
        for part, value in describe_process().items():
            assert value == before[part], (name, part, before[part], value)
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main())
'''
KINDS = ("fit", "fit2", "serve", "connect", "loop")
# Each kind after each, itself too: a cycle.
PAIRS = [
    name
    for number, first in enumerate(KINDS)
    for name in (first, *(each for other in KINDS[number + 1 :] for each in (first, other)))
]


@pytest.mark.parametrize(
    "cells",
    [["loop", "connect"], pytest.param([*PAIRS, *PAIRS, KINDS[0]], marks=pytest.mark.soak)],
    ids=["without Ray", "pairs"],
)
def test_what_a_cell_sets_is_undone_when_it_ends(cells: list[str], tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL)
    tests = str(Path(__file__).parents[1])
    # Not those of the suite's own cluster.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_", "PYTEST_"))}
    environment = {**kept, "SHOAL_HOME": str(tmp_path / "home"), "PYTHONPATH": tests, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, program, *cells], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
