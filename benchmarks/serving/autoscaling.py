"""A day of bursty requests on 1 to 4 replicas: our policy beside Ray Serve's, and how fast a real endpoint follows.

    python -m benchmarks.serving.autoscaling [--runs N] [--quick]

The day is simulated: counts per minute as in the Azure Functions trace of 2019 (Shahrad et al., "Serverless in the
Wild", ATC 2020), where half of the load is constant and the rest follows the hour; a minute's rate varies by a
log-normal factor that lasts some minutes, and some minutes begin a burst of twice the rate. Serve's policy is
the installed one, called with the ongoing requests that it would see. All have the same simulated replicas, whose start
takes as long as was measured with the endpoint on Ray, which is the last row.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from benchmarks.children import ROOT, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Drive
from benchmarks.serving.servers import OURS, server_of
from benchmarks.serving.trace_replay import ObservedLoad, ReplayedTrace, replay, replay_fixed, replay_policy
from shoal.batching.latency_model import ForwardTime
from shoal.libs.bench.sender import OK
from shoal.serve.scaling import ScalePolicy
from shoal.serve.spec.scale import ScaleSpec

PICTURE = ROOT / "docs" / "pictures" / "autoscaling.png"
SECONDS = ForwardTime([(1, 0.1), (16, 0.4)]).tabulate(16)  # a network on one processor: 40 requests/s in full batches
OBJECTIVE_S, MOST = 1.0, 4
MEAN_PER_S = 22.0
CONSTANT = 0.5  # of the load
VARIATION, PERSISTENCE = 0.25, 0.8  # of the logarithm of a minute's factor
BURST_CHANCE, BURST_FACTOR, BURST_MINUTES = 0.01, 2.0, 4
TARGETS = (2, 6, 12, 20)  # ongoing requests of a replica; Serve's default is 2
SERVE, TUNED, QUICK = "Serve, default", "Serve, tuned target", "Serve, tuned target, 3 s up, 60 s down"
DEFAULT_DELAYS_S, QUICK_DELAYS_S = (30.0, 600.0), (3.0, 60.0)
LIVE_RATE = 450.0  # one replica of the live model carries 333
LIVE_S = 45.0


def trace(seed: int, minutes: int = 24 * 60) -> np.ndarray:
    """The arrival times of a day."""
    random, factor, burst, counts = np.random.default_rng(seed), 0.0, 0, []
    for minute in range(minutes):
        factor = PERSISTENCE * factor + random.normal(0.0, VARIATION * math.sqrt(1 - PERSISTENCE**2))
        burst = BURST_MINUTES if random.random() < BURST_CHANCE else max(0, burst - 1)
        hour = CONSTANT + (1 - CONSTANT) * (1 - math.cos(2 * math.pi * minute / minutes))
        counts.append(60 * MEAN_PER_S * hour * math.exp(factor) * (BURST_FACTOR if burst else 1.0))
    spread = [minute * 60 + random.uniform(0, 60, random.poisson(count)) for minute, count in enumerate(counts)]
    return np.sort(np.concatenate(spread))


class ServePolicy:
    """The installed Serve's default policy with its wrapper, its windows, and a clock that we set."""

    def __init__(self, target: float, delays_s: tuple[float, float]) -> None:
        up_s, down_s = delays_s
        self._config = AutoscalingConfig(
            min_replicas=1, max_replicas=MOST, target_ongoing_requests=target, upscale_delay_s=up_s,
            downscale_delay_s=down_s,
        )  # fmt: skip
        self._decide = autoscaling_policy._apply_autoscaling_config(autoscaling_policy.default_autoscaling_policy)
        self._state: dict[str, Any] = {}
        self._ongoing: list[float] = []
        self._reported = 0.0

    def __call__(self, seen: ObservedLoad) -> int:
        config, now_s = self._config, seen.now_s
        self._ongoing.append(seen.ongoing)
        if now_s % config.metrics_interval_s < 1.0:  # replicas report so often
            window = self._ongoing = self._ongoing[-round(config.look_back_period_s) :]
            self._reported = sum(window) / len(window)
        autoscaling_policy.time = SimpleNamespace(time=lambda: now_s)
        context = AutoscalingContext(
            deployment_id=DeploymentID(name="replica"), deployment_name="replica", app_name="m",
            current_num_replicas=seen.running, target_num_replicas=seen.planned, running_replicas=[],
            total_num_requests=self._reported, total_queued_requests=0.0, aggregated_metrics=None, raw_metrics=None,
            capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=MOST, policy_state=self._state,
            last_scale_up_time=None, last_scale_down_time=None, current_time=now_s, config=config,
        )  # fmt: skip
        wanted, self._state = self._decide(context)
        number: int = math.ceil(wanted)
        return max(1, min(MOST, number))


def play_all(arrivals: np.ndarray, start_s: float) -> dict[str, ReplayedTrace]:
    """Every policy on the same arrivals."""

    def serve(target: float, delays_s: tuple[float, float]) -> ReplayedTrace:
        return replay(arrivals, ServePolicy(target, delays_s), SECONDS, OBJECTIVE_S, start_s=start_s)

    found = {OURS: replay_policy(arrivals, ScalePolicy(ScaleSpec(max=MOST), OBJECTIVE_S), SECONDS, OBJECTIVE_S,
                                 start_s=start_s)}  # fmt: skip
    for name, delays_s in ((TUNED, DEFAULT_DELAYS_S), (QUICK, QUICK_DELAYS_S)):
        by_target = {target: serve(target, delays_s) for target in TARGETS}
        if name == TUNED:
            found[SERVE] = by_target[2]
        good = [target for target in TARGETS if by_target[target].within >= 0.99]
        best = min(good, key=lambda each: by_target[each].replica_s) if good else max(
            TARGETS, key=lambda each: by_target[each].within
        )  # fmt: skip
        print(f"{name}: {best} ongoing requests", flush=True)
        found[name] = by_target[best]
    found |= {f"{number} replicas": replay_fixed(arrivals, number, SECONDS, OBJECTIVE_S) for number in (2, 3, MOST)}
    for name, each in found.items():
        print(f"{name}: {each.within:.3%} within {OBJECTIVE_S:g} s, {each.replica_s / 3600:.1f} replica-hours, "
              f"p99 {each.p99_s:.2f} s, {len(each.planned) - 1} changes", flush=True)  # fmt: skip
    return found


def draw(arrivals: np.ndarray, found: dict[str, ReplayedTrace]) -> None:
    """The day's rate, and the replicas of each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = (OURS, SERVE, TUNED)
    figure, panels = plt.subplots(1 + len(shown), 1, figsize=(10, 7), sharex=True)
    counts = np.bincount((arrivals // 60).astype(int)) / 60
    panels[0].plot(np.arange(len(counts)) / 60, counts, color="#666666", linewidth=0.7)
    panels[0].set(ylabel="requests/s")
    for panel, name, colour in zip(panels[1:], shown, ("#1b6ca8", "#b3322f", "#d98a00"), strict=True):
        times = [at / 3600 for at, _ in found[name].planned] + [float(arrivals[-1]) / 3600]
        numbers = [number for _, number in found[name].planned]
        panel.step(times, [*numbers, numbers[-1]], where="post", color=colour, linewidth=0.9)
        each = found[name]
        panel.set(ylabel="replicas", ylim=(0, MOST + 0.5))
        panel.set_title(f"{name}: {each.within:.2%} within {OBJECTIVE_S:g} s, {each.replica_s / 3600:.0f} "
                        "replica-hours", loc="left", fontsize=9)  # fmt: skip
    panels[-1].set(xlabel="hour of the day")
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def count_ready(url: str) -> int:
    """The replicas of a live endpoint that are ready."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10.0)
    try:
        connection.request("GET", "/shoal/v1/status")
        return sum(each["ready"] for each in json.loads(connection.getresponse().read())["replicas"])
    finally:
        connection.close()


def measure_live(folder: Path) -> tuple[float, float]:
    """On Ray, from one replica: seconds from too high a load until a second one is ready, and the part of the last
    third of the requests that was answered within the objective."""
    model = {"max_batch_size": 8, "max_queue_size": 4096}
    scale = {"max": 2, "objective_s": OBJECTIVE_S}
    with server_of(OURS, "sleeper", folder, num_cpus=0.25, scale=scale, model=model) as server:
        assert count_ready(server.url) == 1
        drive = Drive(folder, server.target(), rate=LIVE_RATE, seconds=LIVE_S, warm_up_s=0.0)
        begun_s = drive.begun()
        while count_ready(server.url) < 2:
            if time.monotonic() > begun_s + LIVE_S:
                raise TimeoutError("the endpoint has no second replica")
            time.sleep(0.1)
        ready_s = time.monotonic() - begun_s
        outcome = drive.outcome()
    late = outcome.due_s >= outcome.due_s.min() + LIVE_S * 2 / 3
    in_time = (outcome.done_s - outcome.due_s)[late] <= OBJECTIVE_S
    print(f"live: second replica after {ready_s:.1f} s; {outcome.line()}", flush=True)
    return ready_s, float(np.mean(in_time & (outcome.kinds[late] == OK)))


def rows_of(days: list[dict[str, ReplayedTrace]], live: list[tuple[float, float]]) -> list[Row]:
    def column(name: str, read: Callable[[ReplayedTrace], float]) -> list[float]:
        return [read(day[name]) for day in days]

    def hours(each: ReplayedTrace) -> float:
        return each.replica_s / 3600

    def percent(each: ReplayedTrace) -> float:
        return 100 * each.within

    rows = [
        compare("autoscaling, requests within 1 s", "%", "higher", column(OURS, percent), column(SERVE, percent), SERVE,
                99.0, "value"),
        compare("autoscaling, replica-hours of a day", "h", "lower", column(OURS, hours), column(SERVE, hours), SERVE,
                0.8, "ratio"),
    ]  # fmt: skip
    for peer in (TUNED, QUICK, "2 replicas", "3 replicas", f"{MOST} replicas"):
        note = f"{peer}: {np.median(column(peer, percent)):.2f}% within 1 s"
        rows.append(compare("autoscaling, replica-hours of a day", "h", "lower", column(OURS, hours),
                            column(peer, hours), peer, note=note))  # fmt: skip
    rows.append(compare("autoscaling on Ray, too high a load until a second replica is ready", "s", "lower",
                        [ready_s for ready_s, _ in live]))  # fmt: skip
    rows.append(compare("autoscaling on Ray, requests within 1 s after that", "%", "higher",
                        [100 * within for _, within in live]))  # fmt: skip
    return rows


def main() -> None:
    chosen = options(__doc__, runs=3)
    with scratch() as folder:
        live = [measure_live(folder) for _ in range(1 if chosen.quick else 2)]
    start_s = max(ready_s for ready_s, _ in live)  # the time to the decision is in it, and comes again
    days = []
    for seed in range(chosen.runs):
        arrivals = trace(seed, 180 if chosen.quick else 24 * 60)
        days.append(play_all(arrivals, start_s))
        if not seed and not chosen.quick:
            draw(arrivals, days[0])
    write("serving_autoscaling", rows_of(days, live), chosen.results)


if __name__ == "__main__":
    main()
