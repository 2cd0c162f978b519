"""How long training stands still for a checkpoint that goes to S3: ours, ours to the disk, torch's own by fsspec.

    python -m benchmarks.checkpoint_store [--runs N] [--quick]

The state is 200 MB of parameters and moments of Adam. By turns it is saved by our Checkpointer in a folder, by one with
a store in S3, and by `torch.distributed.checkpoint` with its FsspecWriter and s3fs, `save` and `async_save`, in a
process of its own (.venv-s3fs). Between the turns nothing is in flight. The S3 server is moto's, in a process of its
own on the same machine: its processor time is a row of its own. A stall is measured as in `benchmarks.checkpoint`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from benchmarks.checkpoint import STATE_BYTES, Training, ms_of, saved_by_us
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import Row, compare, options, write
from shoal.checkpoint import Checkpointer
from shoal.store import open_store

BUCKET = "bench"
PEER_PYTHON = str(ROOT / ".venv-s3fs" / "bin" / "python")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
TIMEOUT_S = 600.0
DISK_BAR, PEER_BAR = 1.2, 0.2


def measured(folder: Path, num_runs: int, size_bytes: int) -> dict[str, list[float]]:
    """All turns; before the first, each side has saved once."""
    os.environ.update(ENVIRONMENT)
    found: dict[str, list[float]] = {}
    with Child([OUR_PYTHON, "-m", "benchmarks.ours.bucket", BUCKET], folder) as server:
        os.environ["AWS_ENDPOINT_URL"] = server.answer(TIMEOUT_S)["url"]
        words = [PEER_PYTHON, "benchmarks/peers/dcp_fsspec.py", BUCKET, str(size_bytes)]
        training, store = Training(size_bytes), open_store(f"s3://{BUCKET}/ours")
        training.step()
        with (
            Child(words, folder) as peer,
            Checkpointer(folder / "disk", keep=1) as disk,
            Checkpointer(folder / "spool", keep=1, store=store) as stored,
        ):
            peer.answer(TIMEOUT_S)
            for number in range(num_runs + 1):
                turn = one_turn(number, training, disk, stored, server, peer)
                if number:
                    for name, value in turn.items():
                        found.setdefault(name, []).append(value)
    return found


def one_turn(
    number: int, training: Training, disk: Checkpointer, stored: Checkpointer, server: Child, peer: Child
) -> dict[str, float]:
    """Milliseconds of stalls, and processor seconds. Of our two sides each is first in every second turn."""
    turn = {}
    if number % 2:
        turn["disk"] = saved_by_us(training, disk, number, 0.0)["stall"]
    before_s, ours_s, started_s = server.cpu_s(), time.process_time(), time.perf_counter()
    found = saved_by_us(training, stored, number, 0.0)
    turn["stored"] = found["stall"]
    training_s = time.process_time() - ours_s
    ms_of(lambda: stored.finish_uploads(TIMEOUT_S))
    turn["until stored"] = 1e3 * (time.perf_counter() - started_s)
    turn["upload, processor"] = time.process_time() - ours_s - training_s
    turn["server, ours"] = server.cpu_s() - before_s
    if not number % 2:
        turn["disk"] = saved_by_us(training, disk, number, 0.0)["stall"]
    for name, is_asynchronous in (("peer", False), ("peer, asynchronous", True)):
        before_s = server.cpu_s()
        answer = peer.ask(TIMEOUT_S, asynchronous=is_asynchronous)
        turn |= {name: answer["stall_ms"], f"{name}, until": answer["whole_ms"], f"{name}, processor": answer["cpu_s"]}
        turn[f"server, {name}"] = server.cpu_s() - before_s
    return turn


def rows_of(found: dict[str, list[float]], size_bytes: int) -> list[Row]:
    size = f"{size_bytes / 1e6:.0f} MB"
    stall = f"stall of a checkpoint to S3, {size}"
    saved, saved_later = "torch.distributed.checkpoint.save, s3fs", "torch.distributed.checkpoint.async_save, s3fs"
    until = f"a checkpoint until it is in S3, {size}"
    note = "the server is moto's, on the same cores"
    of_server = f"processor time of the S3 server for a checkpoint, {size}"
    upload = f"processor time of an upload, {size}"
    after = "ours: of the upload that goes on when the file is on the disk, without the copy and the step"
    later, ours = found["peer, asynchronous"], found["stored"]
    whole, processor = found["until stored"], found["upload, processor"]
    return [
        compare(stall, "ms", "lower", ours, found["disk"], "ours, to the disk", DISK_BAR, "ratio", note),
        compare(f"{stall}, peer", "ms", "lower", ours, found["peer"], saved, PEER_BAR, "ratio", note),
        compare(f"{stall}, asynchronous peer", "ms", "lower", ours, later, saved_later, note=note),
        compare(until, "ms", "lower", whole, found["peer, until"], saved, note=note),
        compare(upload, "s", "lower", processor, found["peer, processor"], saved, note=after),
        compare(of_server, "s", "lower", found["server, ours"], found["server, peer"], saved),
    ]


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    chosen = options(__doc__, runs=9)
    size_bytes = STATE_BYTES // 10 if chosen.quick else STATE_BYTES
    with scratch() as folder:
        found = measured(folder, chosen.runs, size_bytes)
    write("checkpoint_store", rows_of(found, size_bytes), chosen.results)


if __name__ == "__main__":
    main()
