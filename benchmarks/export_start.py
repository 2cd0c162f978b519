"""The cold start of an exported folder, from the process's start to its first answer, beside an endpoint's replica.

    python -m benchmarks.export_start [--runs N] [--quick]

LeNet. Ours: the folder of `shoal export lenet --to container`, by `server.py`, and that of `--to lambda`, in AWS's own
client of the Runtime API. The peer: a replica of an endpoint with the registered model, as a process without Ray, which
in a cluster comes before and in addition. All answer the same request; the files are in the page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.children import OUR_PYTHON, ROOT, scratch
from benchmarks.result import compare, options, write
from benchmarks.talk import parse
from shoal.libs.export.export_model import ExportSpec, export_model
from shoal.libs.export.runtime.runtime_api import start_function
from shoal.libs.export.runtime.server_process import start_server
from shoal.models.lenet import LeNet
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot

BAR = 0.2
NAME = "lenet"


def register() -> None:
    arrays = {name: value.numpy() for name, value in LeNet().state_dict().items()}
    signature = Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 1, 28, 28])],
        outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 10])],
    )
    factory = ModelFactory(factory="shoal.models.lenet:LeNet")
    Registry().register(NAME, WeightSnapshot.of(1, arrays), model=factory, signature=signature)


def start_folder(start: Callable[[Path], Any], folder: Path, request: dict[str, Any]) -> float:
    """Seconds to the first answer."""
    began_s = time.perf_counter()
    with start(folder) as ask:
        status, _ = ask(request)
        taken_s = time.perf_counter() - began_s
    assert status == 200
    return taken_s


def start_replica(request: dict[str, Any]) -> float:
    """Seconds to the first answer."""
    began_s = time.perf_counter()
    command = [OUR_PYTHON, "-m", "benchmarks.ours.replica_start", NAME]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = next((found for line in process.stdout if (found := parse(line))), None)
            assert told is not None, "the replica has ended"
            with urllib.request.urlopen(told["url"], json.dumps(request).encode(), 60) as answer:
                assert answer.status == 200
            return time.perf_counter() - began_s
        finally:
            process.terminate()


def main() -> None:
    chosen = options(__doc__, runs=9)
    server_s: list[float] = []
    function_s: list[float] = []
    replica_s: list[float] = []
    with scratch() as scratch_folder:
        os.environ["SHOAL_HOME"] = str(scratch_folder / "home")
        register()
        folders = {to: scratch_folder / to for to in ("container", "lambda")}
        for to, folder in folders.items():
            export_model(ExportSpec.parse({"model": NAME, "to": to, "into": str(folder)}))
        request = json.loads((folders["container"] / "request.json").read_bytes())
        for turn in range(-1, chosen.runs):
            steps = [
                lambda: server_s.append(start_folder(start_server, folders["container"], request)),
                lambda: replica_s.append(start_replica(request)),
                lambda: function_s.append(start_folder(start_function, folders["lambda"], request)),
            ]
            for step in steps if turn % 2 else reversed(steps):
                step()
            if turn < 0:  # compiles and reads the files
                for taken_s in (server_s, replica_s, function_s):
                    taken_s.clear()
    name, peer = "cold start of LeNet, from the process to the first answer", "an endpoint's replica, without Ray"
    rows = [
        compare(f"{name}, exported as a server", "s", "lower", server_s, replica_s, peer, bar=BAR, bar_kind="ratio"),
        compare(f"{name}, exported as a Lambda function", "s", "lower", function_s, replica_s, peer),
    ]
    write("export_start", rows, chosen.results)


if __name__ == "__main__":
    sys.exit(main())
