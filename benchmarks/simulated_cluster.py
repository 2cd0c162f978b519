"""10,000 actors at one gateway, and 1,000 nodes with a queue of runs: the rules, on a simulated clock.

    python -m benchmarks.simulated_cluster [--quick] [--results FOLDER]

The rules are the product's own functions. *Credit*: `grant_credit`, every 50 ms; actors differ in speed (a log-normal
factor, σ 0.5), and the learner takes half of what they could send. Credit that lapses is not simulated. *Admission*:
`order_waiting` and `has_capacity` for runs of 1 to 512 CPUs at 1,000 nodes of 8; 50 owners, of whom one starts half of
all runs; together they ask for 1.2 times what there is. Where Ray places a run's workers is not simulated.
"""

from __future__ import annotations

import heapq
import statistics
import time
from dataclasses import replace

import numpy as np

from benchmarks.result import Row, compare, options, write
from shoal.cluster.run_queue import AdmissionState, QueuedRun, has_capacity, order_waiting
from shoal.rl.gateway.sessions import grant_credit

NUM_ACTORS, SEGMENT_S, SPREAD, MAX_CREDITS, ROUND_S = 10_000, 2.5, 0.5, 8, 0.05
NUM_NODES, CPUS, NUM_OWNERS, RUN_S, OVERLOAD = 1_000, 8, 50, 600.0, 1.2


def simulate_credit(seconds: float) -> list[Row]:
    random = np.random.default_rng(0)
    segment_s = SEGMENT_S * np.exp(random.normal(0.0, SPREAD, NUM_ACTORS))
    due_s = segment_s * random.random(NUM_ACTORS)
    credit, sent = np.zeros(NUM_ACTORS, int), np.zeros(NUM_ACTORS, int)
    order = np.arange(NUM_ACTORS)  # the longest waiting first, as the gateway has its sessions
    per_round = float((1.0 / segment_s).sum()) / 2 * ROUND_S
    queued, taken, num_broken = 0, 0.0, 0
    took_s = []
    for number in range(round(seconds / ROUND_S)):
        now_s = number * ROUND_S
        ready = np.flatnonzero((due_s <= now_s) & (credit > 0))
        credit[ready] -= 1
        sent[ready] += 1
        due_s[ready] = now_s + segment_s[ready]
        taken = min(queued + len(ready), taken + per_round)
        queued += len(ready) - int(taken)
        taken %= 1.0
        open_credit = dict(zip(order.tolist(), credit[order].tolist(), strict=True))
        began_s = time.perf_counter()
        grants = grant_credit(open_credit, queued, NUM_ACTORS, MAX_CREDITS)
        took_s.append(time.perf_counter() - began_s)
        granted = np.array(list(grants), int)
        credit[granted] += list(grants.values())
        order = np.concatenate([order[~np.isin(order, granted)], granted])
        num_broken += queued + int(credit.sum()) > NUM_ACTORS
    least = np.sort(sent)[: NUM_ACTORS // 10].mean() / np.median(sent)
    title = f"{NUM_ACTORS:,} simulated actors, {seconds:g} s"
    note = f"a queue of {NUM_ACTORS:,}; {int(sent.sum()):,} segments"
    return [
        compare(f"{title}: rounds with more segments and credit than slots", "rounds", "lower", [float(num_broken)],
                bar=0.0, bar_kind="value", note=note),
        compare(f"{title}: segments of the slowest tenth over the median", "", "higher", [float(least)], bar=0.5,
                bar_kind="value", note=note),
        compare(f"{title}: one round of credit", "ms", "lower", [1e3 * statistics.median(took_s)]),
    ]  # fmt: skip


def simulate_admission(num_runs: int) -> list[Row]:
    random = np.random.default_rng(0)
    needs = 2.0 ** random.integers(0, 10, num_runs)
    lasts_s = random.exponential(RUN_S, num_runs)
    total = float(NUM_NODES * CPUS)
    arrives_s = np.cumsum(random.exponential(needs.mean() * RUN_S / total / OVERLOAD, num_runs))
    owners = np.where(random.random(num_runs) < 0.5, 0, random.integers(1, NUM_OWNERS, num_runs))
    events = [(arrives_s[number], number) for number in range(num_runs)]
    runs: dict[int, QueuedRun] = {}
    waits_s: dict[int, list[float]] = {0: [], 1: []}
    num_broken, took_s = 0, []
    while events:
        now_s, number = heapq.heappop(events)
        if number in runs:
            del runs[number]
        else:
            runs[number] = QueuedRun(str(number), "", str(owners[number]), 0, now_s, {"CPU": needs[number]})
        began_s = time.perf_counter()
        for each in order_waiting(list(runs.values())):
            running = sum(other.needs["CPU"] for other in runs.values() if other.state is not AdmissionState.WAITING)
            if not has_capacity(each, list(runs.values()), {"CPU": total - running}):
                break  # those behind it need the same
            started = int(each.run_id)
            runs[started] = replace(each, state=AdmissionState.RUNNING)
            waits_s[min(1, owners[started])].append(now_s - each.since_s)
            heapq.heappush(events, (now_s + lasts_s[started], started))
            num_broken += running + each.needs["CPU"] > total
        took_s.append(time.perf_counter() - began_s)
    busy, others = (statistics.mean(waits_s[owner]) for owner in (0, 1))
    title = f"{num_runs:,} simulated runs on {NUM_NODES:,} nodes"
    return [
        compare(f"{title}: starts beyond what there is", "starts", "lower", [float(num_broken)], bar=0.0,
                bar_kind="value"),
        compare(f"{title}: runs that never started", "runs", "lower", [num_runs - sum(map(len, waits_s.values()))],
                bar=0.0, bar_kind="value"),
        compare(f"{title}: mean wait of the other owners' runs over that of the busiest's", "s", "lower", [others],
                [busy], "the owner of half of all runs", bar=1.0, bar_kind="ratio",
                note=f"the longest wait of all: {max(map(max, waits_s.values())):,.0f} s; a run takes {RUN_S:g} s"),
        compare(f"{title}: one decision", "ms", "lower", [1e3 * statistics.median(took_s)],
                note=f"the longest {1e3 * max(took_s):,.0f} ms"),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1)
    seconds, num_runs = (30.0, 300) if chosen.quick else (600.0, 3_000)
    write("simulated_cluster", [*simulate_credit(seconds), *simulate_admission(num_runs)], chosen.results)


if __name__ == "__main__":
    main()
