"""The registry on a bucket: registrations at once, and how long a large version takes to load.

    python -m benchmarks.store [--runs N] [--quick]

Sixteen processes register a version and promote it at the same moment; then a version of 500 MB is loaded on a host
that has no copy of it, and again. Loading is the look-up, the payload with its checksum verified once, and tensors in
memory of their own; the peer is `safetensors.torch.load_file` of a file of the same content on this disk, whose pages
are in memory as ours are, with a copy of each tensor, and it verifies nothing. The S3 server is moto's, in a process of
its own on the same cores: a second peer of the first load is obstore's download into memory, without file, checksum or
tensors. The server reads the whole object for each range of it that is asked for, which a real one does not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import obstore
import safetensors.torch
import torch

from benchmarks.checkpoint_store import BUCKET, ENVIRONMENT, TIMEOUT_S
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.home import home
from shoal.registry import ModelFactory, Registry, Signature
from shoal.store import open_store
from shoal.store.objects import ObjectStore
from shoal.weights import WeightSnapshot
from shoal.weights.tensor_files import read_tensors

NUM_WRITERS = 16
PAYLOAD_BYTES = 500_000_000
FIRST_BAR, FETCHED_BAR, AGAIN_BAR = 3.0, 1.5, 1.05
FACTORY, SIGNATURE = ModelFactory(factory="a:b"), Signature(inputs=[], outputs=[])


def register(location: str, payload: bytes, name: str) -> int:
    snapshot = WeightSnapshot.from_payload(1, payload)
    return Registry(location).register(name, snapshot, model=FACTORY, signature=SIGNATURE).version


def write_at_once(location: str) -> tuple[float, int]:
    """The seconds of all, and how many distinct versions there are, if the champion is one of them; else 0."""
    command = [OUR_PYTHON, "-m", "benchmarks.store", "--write-to", location]
    writers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(NUM_WRITERS)
    ]
    for each in writers:
        assert each.stdout is not None
        each.stdout.readline()
    began_s = time.perf_counter()
    for each in writers:
        assert each.stdin is not None
        each.stdin.close()
    numbers = {int(each.stdout.read()) for each in writers if each.stdout is not None}
    taken_s = time.perf_counter() - began_s
    assert not any(each.wait(TIMEOUT_S) for each in writers)
    registry = Registry(location)
    found = {each.version for each in registry.list("small")}
    promoted = registry.aliases("small").list_promoted("champion")
    is_right = numbers == found == set(promoted) and registry.get("small@champion").version == promoted[-1]
    return taken_s, len(found) if is_right else 0


def write_one(location: str) -> None:
    payload = safetensors.torch.save({"w": torch.zeros(1000)})
    print("ready", flush=True)
    sys.stdin.read()
    print(register(location, payload, "small"))


def load(location: str) -> None:
    read_tensors(Registry(location).get("large@1").weight_file())


def seconds_of(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def load_by_turns(location: str, path: Path, num_runs: int, server: Child) -> dict[str, list[float]]:
    store = open_store(location)
    assert isinstance(store, ObjectStore)
    found: dict[str, list[float]] = {name: [] for name in ("peer", "first", "again", "download", "server")}
    safetensors.torch.load_file(path)
    for _ in range(num_runs):
        shutil.rmtree(home() / "cache", ignore_errors=True)
        found["peer"].append(
            seconds_of(lambda: {name: each.clone() for name, each in safetensors.torch.load_file(path).items()})
        )
        found["download"].append(seconds_of(lambda: obstore.get(store._client, "large/1/weights.safetensors").bytes()))
        before_s = server.cpu_s()
        found["first"].append(seconds_of(lambda: load(location)))
        found["server"].append(server.cpu_s() - before_s)
        found["again"].append(seconds_of(lambda: load(location)))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--write-to"]:
        write_one(sys.argv[2])
        return
    chosen = options(__doc__, runs=7)
    size_bytes = PAYLOAD_BYTES // 10 if chosen.quick else PAYLOAD_BYTES
    with scratch() as folder:
        os.environ |= ENVIRONMENT | {"SHOAL_HOME": str(folder / "home")}
        with Child([OUR_PYTHON, "-m", "benchmarks.ours.bucket", BUCKET], folder) as server:
            os.environ["AWS_ENDPOINT_URL"] = server.answer(TIMEOUT_S)["url"]
            at_once = [write_at_once(f"s3://{BUCKET}/registry-{run}") for run in range(chosen.runs)]
            tensors = {f"w{number}": torch.rand(size_bytes // 80) for number in range(20)}
            safetensors.torch.save_file(tensors, folder / "large.safetensors")
            location = f"s3://{BUCKET}/large"
            register(location, (folder / "large.safetensors").read_bytes(), "large")
            loads = load_by_turns(location, folder / "large.safetensors", chosen.runs, server)
    write("store", rows_of(at_once, loads, size_bytes), chosen.results)


def rows_of(at_once: list[tuple[float, int]], loads: dict[str, list[float]], size_bytes: int) -> list[Row]:
    size, peer = f"{size_bytes / 1e6:.0f} MB", "safetensors from the disk"
    versions = [float(count) for _, count in at_once]
    note = f"{NUM_WRITERS} processes on the cores of the S3 server"
    return [
        compare("distinct versions of 16 registrations at once", "", "higher", versions, bar=16, bar_kind="value"),
        compare("16 registrations and promotions at once", "s", "lower", [each for each, _ in at_once], note=note),
        compare(
            f"load of {size} from S3, first", "s", "lower", loads["first"], loads["peer"], peer, FIRST_BAR, "ratio"
        ),
        compare(
            f"load of {size} from S3, first, beside the download",
            "s",
            "lower",
            loads["first"],
            [sum(both) for both in zip(loads["download"], loads["peer"], strict=True)],
            "obstore into memory, and safetensors from the disk",
            FETCHED_BAR,
            "ratio",
            note=f"ours: with file and checksum; the download alone: {statistics.median(loads['download']):.2f} s",
        ),
        compare("processor time of the S3 server for a first load", "s", "lower", loads["server"]),
        compare(f"load of {size}, again", "s", "lower", loads["again"], loads["peer"], peer, AGAIN_BAR, "ratio"),
    ]


if __name__ == "__main__":
    main()
