"""A million requests at an endpoint of two models, with 20 promotions, 20 kills of replicas and 20 scale events.

    python -m benchmarks.serving.million [--quick] [--results FOLDER]

An open loop of 500 requests/s, in rounds of 50,000: in each a version becomes a canary of half of the requests and is
promoted, of one of the two models by turns; replicas go from two to three or back; one is killed (SIGKILL). Every
answer is compared with its model and the version that it names. *Lost*: no answer, or a part of one. After each round
the file of the results has the rounds until then.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from benchmarks.children import pause_until, scratch
from benchmarks.result import Row, compare, options, save, write
from benchmarks.serving.changes import BODY, kill, open_endpoint
from benchmarks.serving.drive import Drive, Outcome, Target, http_request
from benchmarks.serving.scaled import NAME, scale
from shoal.errors import ShoalError
from shoal.libs.bench.sender import INCOMPLETE, LOST, OK, UNANSWERED

MODELS = (NAME, "other")
RATE, NUM_ROUNDS, ROUND_S, QUICK_ROUND_S = 500.0, 20, 100.0, 20.0
TIMEOUT_S = 75.0  # above what HAProxy waits for an answer
LOSSES = (LOST, INCOMPLETE, UNANSWERED)


def disturb(client: Any, number: int, begin_s: float, seconds: float) -> list[str]:
    """The three events of a round; returns which failed, and why."""
    failed = []
    name, version = MODELS[number % 2], 2 + number // 2

    def promote() -> None:
        client.rollout("canary", name, version=version, percent=50.0)
        client.rollout("promote", name)

    events = {"promotion": promote, "scale": lambda: scale("replica", 2 + (number + 1) % 2), "kill": lambda: kill(2)}
    for index, (what, act) in enumerate(events.items()):
        pause_until(begin_s + seconds * index / len(events))
        try:
            act()
        except (ShoalError, TimeoutError, AssertionError) as error:
            failed.append(f"{what} {number}: {error!r}"[:200])
    return failed


def make_rows(outcomes: list[Outcome], failed: list[str]) -> list[Row]:
    kinds = Counter(kind for each in outcomes for kind in each.kinds.tolist())
    latencies_s = np.concatenate([each.latency_s for each in outcomes])
    num, rounds, lost = kinds.total(), len(outcomes), sum(kinds[each] for each in LOSSES)
    num_versions = len({version for each in outcomes for version in np.unique(each.versions).tolist()} - {0})
    title = f"{num:,} requests through {rounds} promotions, {rounds} kills and {rounds} scale events of two models"
    late_ms = float(1e3 * np.percentile(np.concatenate([each.sent_s - each.due_s for each in outcomes]), 99.9))
    note = f"{dict(kinds)}; {num_versions} versions answered; events that failed: {failed or 'none'}"
    value: dict[str, Any] = {"bar": 0.0, "bar_kind": "value"}
    return [
        compare(f"{title}: lost", "requests", "lower", [lost], note=note, **value),
        compare(f"{title}: mixed", "requests", "lower", [kinds["mixed"]], **value),
        compare(f"{title}: refused", "requests", "lower", [num - kinds[OK] - kinds["mixed"] - lost]),
        *(
            compare(f"{title}: p{percent:g}", "ms", "lower", [float(1e3 * np.percentile(latencies_s, percent))],
                    note=f"sent p99.9 {late_ms:.1f} ms after due, which it contains")
            for percent in (50, 99, 99.9)
        ),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1)
    num_rounds, seconds = (2, QUICK_ROUND_S) if chosen.quick else (NUM_ROUNDS, ROUND_S)
    outcomes: list[Outcome] = []
    failed: list[str] = []
    rows: list[Row] = []
    with scratch() as folder, open_endpoint(folder / "home", MODELS, 2 + NUM_ROUNDS // 2) as endpoint:
        from shoal.client import Client

        scale("replica", 2)
        urls = [f"{endpoint.url}/v2/models/{name}/infer" for name in MODELS]
        target = Target(endpoint.url, [http_request(url, BODY.encode()) for url in urls])
        with Client(endpoint.url, timeout_s=TIMEOUT_S) as client:
            for number in range(num_rounds):
                plan = {"rate": RATE, "seconds": seconds, "seed": number, "timeout_s": TIMEOUT_S, "check": "models"}
                with Drive(folder, target, **plan) as drive:
                    failed += disturb(client, number, drive.begun() + 1.0, seconds)
                    outcomes.append(drive.outcome())
                print(f"round {number + 1}: {outcomes[-1].line()}", flush=True)
                rows = make_rows(outcomes, failed)
                save("serving_million", rows, chosen.results)
    write("serving_million", rows, chosen.results)


if __name__ == "__main__":
    main()
