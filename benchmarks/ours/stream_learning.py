"""Our online trainer on the values of a series, as `benchmarks.peers.deep_river` does it, for one series or many.

    python -m benchmarks.ours.stream_learning

Answers commands (see `benchmarks.talk`) {values, num_series, hidden, num_steps, rate, learn_every, count} with messages
a second and errors. Many series are the same one, each begun at another value and continued from its beginning: at each
moment, one message of each. count: moments; 0: as many as values.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.talk import commands, say
from shoal.libs.stream.messages import Message
from shoal.libs.stream.spec import OnlineSpec
from shoal.libs.stream.trainer import OnlineTrainer


def measure(
    values: list[float], num_series: int, hidden: int, num_steps: int, rate: float, learn_every: int, count: int
) -> dict[str, Any]:
    """Messages a second, mean absolute error, and that of the forecast "as now"."""
    count = count or len(values)
    spec = OnlineSpec(hidden=hidden, num_steps=num_steps, learning_rate=rate, learn_every=learn_every)
    shifts = [len(values) * series // num_series for series in range(num_series)]
    batches = [
        [
            Message(str(series), (values[(at + shift) % len(values)],), float(at), "p", at * num_series + series)
            for series, shift in enumerate(shifts)
        ]
        for at in range(count)
    ]
    trainer = OnlineTrainer(spec)
    began_s = time.perf_counter()
    for batch in batches:
        trainer.process(batch, lambda answers: None)
    seconds = time.perf_counter() - began_s
    totals = trainer.totals
    assert totals.num_messages == count * num_series
    return {
        "per_s": totals.num_messages / seconds,
        "mae": totals.absolute_error / totals.num_forecasts,
        "as_now": totals.naive_error / totals.num_forecasts,
    }


def main() -> None:
    torch.set_num_threads(1)
    for asked in commands():
        say(**measure(**asked))


if __name__ == "__main__":
    main()
