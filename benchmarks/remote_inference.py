"""Actions a second of 32 client processes on sockets, beside TorchRL's InferenceServer over its shared memory.

    python -m benchmarks.remote_inference [--runs N] [--quick]

The policy is CartPole's (4 inputs, 64x64, 2 actions). Each client asks for one action after another. Ours are clients
of the protocol (`bare`: pyzmq and msgpack) and of `shoal.connect` (`python`); the gateway also assembles, counts and
queues their segments, which a consumer takes. TorchRL's are processes that were forked with its client: it has two
transports over shared memory, and the one that answers more is the peer.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict

from benchmarks.children import OUR_PYTHON, ROOT, TORCHRL
from benchmarks.result import compare, options, write

NUM_CLIENTS = 32
SERVERS = {
    "bare": [OUR_PYTHON, "-m", "benchmarks.ours.remote_inference_server"],
    "python": [OUR_PYTHON, "-m", "benchmarks.ours.remote_inference_server"],
    "shared_memory": [str(TORCHRL / "bin/python"), "benchmarks/peers/torchrl_server.py"],
    "process_slot": [str(TORCHRL / "bin/python"), "benchmarks/peers/torchrl_server.py"],
}


def measure(kind: str, seconds: float) -> dict[str, float]:
    """One run."""
    command = [*SERVERS[kind], str(NUM_CLIENTS), str(seconds), kind]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=seconds + 120,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    chosen = options(__doc__, runs=5)
    seconds = 2.0 if chosen.quick else 8.0
    rates, tails = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for number in range(chosen.runs):
        for kind in SERVERS:
            found = measure(kind, seconds)
            rates[kind].append(found["rate"])
            tails[kind].append(found["p99_ms"])
            print(f"run {number + 1}, {kind}: {found}", flush=True)
    peer = max(("shared_memory", "process_slot"), key=lambda kind: sorted(rates[kind])[chosen.runs // 2])
    note = f"TorchRL's transport is {peer}; the other one's rates: " + ", ".join(
        f"{rate:,.0f}" for kind in ("shared_memory", "process_slot") if kind != peer for rate in rates[kind]
    )
    name, peer_name = "remote inference, 32 clients on sockets", f"TorchRL InferenceServer, {peer}"
    rows = [
        compare(name, "actions/s", "higher", rates["bare"], rates[peer], peer_name, 1.5, "ratio", note),
        compare(f"{name}: p99", "ms", "lower", tails["bare"], tails[peer], peer_name, 10.0, "value"),
        compare(f"{name} of shoal.connect", "actions/s", "higher", rates["python"], rates[peer], peer_name),
        compare(f"{name} of shoal.connect: p99", "ms", "lower", tails["python"], tails[peer], peer_name),
    ]
    write("remote_inference", rows, chosen.results)


if __name__ == "__main__":
    main()
