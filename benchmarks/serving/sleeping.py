"""What an endpoint that sleeps does with requests that cannot be answered, beside the endpoint of an earlier commit.

    python -m benchmarks.serving.sleeping [--before REVISION] [--runs N] [--quick]

Each run puts a small model with a token on a cluster of its own and waits until it sleeps. Then come, in this order: 50
requests without a key (replicas started), one with a deadline of 100 ms (seconds until its answer), and, once the
endpoint sleeps again and the model's weights are gone, one with the key (seconds until its answer).
"""

from __future__ import annotations

import http.client
import os
import sys
import time
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

from benchmarks.before import checkout
from benchmarks.children import OUR_PYTHON, ROOT, Child, scratch
from benchmarks.result import compare, options, write
from benchmarks.serving.gang import SMALL, register
from benchmarks.talk import say

BEFORE, TOKEN, NUM_REQUESTS = "e3cf4d1b", "secret", 50
INFER, SLEEP_S, SETTLE_S, TIMEOUT_S = "/v2/models/small/infer", 120.0, 4.0, 100.0
BARS = {"replicas started without a key": 0.0}


def ask(netloc: str, **headers: str) -> tuple[int, float]:
    """The status, and how long it took."""
    asked_s = time.monotonic()
    with closing(http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", INFER, b"{}", {name.replace("_", "-"): each for name, each in headers.items()})
        answer = connection.getresponse()
        answer.read()
    return answer.status, time.monotonic() - asked_s


def drive() -> None:
    """The process of the endpoint's driver."""
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")
    from shoal.cluster.embedded_cluster import start_cluster
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.spec.endpoint import EndpointSpec
    from shoal.serve.spec.model_source import model_from_ref

    version = register("small", SMALL)
    scale = {"min": 0, "max": 1, "idle_s": 2}
    spec = EndpointSpec.parse({"name": "sleeper", "num_cpus": 0.1, "token": TOKEN, "scale": scale})
    with start_cluster(num_cpus=4) as cluster, ExitStack() as stack:
        os.environ.update(cluster.environment)
        import ray

        ray.init(log_to_driver=False)
        stack.callback(ray.shutdown)
        endpoint = stack.enter_context(closing(deploy(spec, [model_from_ref("small@champion")])))
        netloc, seen = urlsplit(endpoint.url).netloc, set[str]()

        def count(until_s: float) -> int:
            while time.monotonic() < until_s:
                seen.update(each["id"] for each in endpoint.status()["replicas"])
                time.sleep(0.05)
            return len(seen)

        def sleep() -> None:
            ends_s = time.monotonic() + SLEEP_S
            while not endpoint.status()["asleep"]:
                assert time.monotonic() < ends_s, "it does not sleep"
                time.sleep(0.1)
            time.sleep(SETTLE_S)

        sleep()
        statuses = [ask(netloc)[0] for _ in range(NUM_REQUESTS)]
        started = count(time.monotonic() + SETTLE_S)
        sleep()
        late = ask(netloc, authorization=f"Bearer {TOKEN}", shoal_deadline_ms="100")
        sleep()
        os.rename(version.weight_file().path, f"{version.weight_file().path}.gone")
        failed = ask(netloc, authorization=f"Bearer {TOKEN}")
        say(statuses=sorted({*statuses}), started=started, late=late, failed=failed)


def main() -> None:
    chosen = options(__doc__, runs=3, before=BEFORE)
    found: dict[tuple[str, str], list[float]] = {}
    notes = []
    with scratch() as folder, checkout(chosen.before, folder) as before:
        for run in range(chosen.runs):
            for side, package in (("own", ROOT / "platform"), ("before", before)):
                env = {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
                env["SHOAL_HOME"] = str(folder / f"home-{side}-{run}")
                with Child(
                    [OUR_PYTHON, "-m", "benchmarks.serving.sleeping", "drive"], folder, env, goodbye_s=20
                ) as child:
                    said = child.answer(6 * TIMEOUT_S)
                found.setdefault(("replicas started without a key", side), []).append(said["started"])
                found.setdefault(("answer to a deadline of 100 ms", side), []).append(said["late"][1])
                found.setdefault(("answer when the model cannot be loaded", side), []).append(said["failed"][1])
                notes.append(f"{side}: {said['statuses']}, {said['late'][0]}, {said['failed'][0]}")
    rows = [
        compare(
            f"a sleeping endpoint: {name}", "s" if "answer" in name else "", "lower", found[name, "own"],
            found[name, "before"], f"before ({chosen.before})", BARS.get(name), "value" if name in BARS else None,
            "statuses: " + "; ".join(sorted({*notes})),
        )
        for name in dict.fromkeys(name for name, _ in found)
    ]  # fmt: skip
    write("serving_sleeping", rows, chosen.results)


if __name__ == "__main__":
    drive() if sys.argv[1:] == ["drive"] else main()
