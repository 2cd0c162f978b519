"""An LSTM that learns from each message as it comes, and answers it before: test, then learn.

Called by `StreamLoop` and by benchmarks. Knows neither brokers nor disks: a function of batches, in their order. The
same batches leave the same weights to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from shoal.errors import SpecMismatch
from shoal.libs.stream.messages import Message
from shoal.libs.stream.network import MAX_DEVIATIONS, StepWeights, StreamNetwork, observe
from shoal.libs.stream.sensor_table import SensorTable
from shoal.libs.stream.spec import OnlineSpec


class SensorForecast(NamedTuple):
    """A forecast of the sensor's value, `horizon` messages after `message`; `num_updates` tells which weights made
    it."""

    message: Message
    prediction: float
    num_updates: int


@dataclass
class PrequentialTotals:
    """Sums over all forecasts whose value has come. Prequential: each was made before any learning from that value.

    naive_error: of the forecast "as now"
    """

    num_messages: int = 0
    num_forecasts: int = 0
    absolute_error: float = 0.0
    squared_error: float = 0.0
    naive_error: float = 0.0
    scaled_error: float = 0.0
    num_clock_jumps: int = 0
    num_drifts: int = 0


class PageHinkley:
    """Alarms when the cumulated excess of errors over their mean rises `threshold` above its lowest value.

        m_t = m_{t-1} + (e_t - mean(e_1..e_t) - tolerance);   alarm: m_t - min(m) > threshold

    For all sensors at once. Page, "Continuous inspection schemes" (1954); Gama et al., "A survey on concept drift
    adaptation" (2014), section 3.2.2. After an alarm, a sensor's test begins again.

    min_count: errors of a sensor before its first alarm
    """

    FIELDS = ("counts", "means", "sums", "minima")

    def __init__(self, tolerance: float = 0.25, threshold: float = 50.0, min_count: int = 100) -> None:
        self._tolerance = tolerance
        self._threshold = threshold
        self._min_count = min_count
        self._state = np.zeros((len(self.FIELDS), 0))

    def update(self, sensors: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Which of `sensors` [B], each at most once, drift with these errors [B]."""
        missing = int(sensors.max(initial=-1)) + 1 - self._state.shape[1]
        if missing > 0:
            self._state = np.pad(self._state, ((0, 0), (0, missing)))
        counts, means, sums, minima = self._state[:, sensors]
        counts += 1
        means += (errors - means) / counts
        sums = sums + errors - means - self._tolerance
        minima = np.minimum(minima, sums)
        is_drifting = (sums - minima > self._threshold) & (counts >= self._min_count)
        self._state[:, sensors] = np.where(is_drifting, 0.0, (counts, means, sums, minima))
        drifting: np.ndarray = sensors[is_drifting]
        return drifting

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(self.FIELDS, self._state.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = np.array([state[name] for name in self.FIELDS], np.float64)


class _Adam:
    """Steps as `torch.optim.Adam(parameters, learning_rate, fused=True)`, to the bit and with its state. That class
    imports torch's compiler, which takes a second, in which a stream that begins again answers nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> None:
        self._parameters, self._learning_rate = list[Tensor](parameters), learning_rate
        self._moments = [[torch.zeros_like(each, requires_grad=False) for each in self._parameters] for _ in range(2)]
        self._steps = [torch.zeros(()) for _ in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients: list[Tensor] = [each.grad for each in self._parameters if each.grad is not None]
        first, second = self._moments
        adam(
            self._parameters, gradients, first, second, [], self._steps, foreach=False, fused=True, amsgrad=False,
            beta1=0.9, beta2=0.999, lr=self._learning_rate, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        for each in self._parameters:
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """A copy."""
        states = zip(self._steps, *self._moments, strict=True)
        names = ("step", "exp_avg", "exp_avg_sq")
        return {"state": {at: dict(zip(names, map(torch.clone, each), strict=True)) for at, each in enumerate(states)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for at, each in state["state"].items():
            found = (self._steps[at], self._moments[0][at], self._moments[1][at])
            for own, name in zip(found, ("step", "exp_avg", "exp_avg_sq"), strict=True):
                own.copy_(each[name])


class OnlineTrainer:
    """Answers and learns batches of messages; at most one step of a sensor at a time.

    A batch in which a sensor has several messages is taken in waves: the first message of each sensor, then the second,
    and so on. Each wave is answered. Its sensors that are due are pending until one step of the optimizer runs over the
    windows of all that are: when they are `update_sensors`, before one of them is answered again, or with a batch
    without messages. See `OnlineSpec`. The learner is on the CPU, in the caller's thread.
    """

    def __init__(self, spec: OnlineSpec) -> None:
        self.spec = spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.network = StreamNetwork(spec.width, spec.hidden, spec.horizon, spec.memory)
        self.table = SensorTable(spec.width, spec.hidden, spec.horizon, spec.num_steps)
        self.optimizer = _Adam(self.network.parameters(), spec.learning_rate)
        self.drift = PageHinkley()
        self.totals = PrequentialTotals()
        self.num_batches = self.num_updates = 0
        self._weights = StepWeights.view(self.network)
        self._pending: dict[int, None] = {}  # rows that are due, in the order of their messages

    @property
    def num_pending(self) -> int:
        """Sensors that the next update takes: they were answered, and are due."""
        return len(self._pending)

    def process(self, messages: Sequence[Message], publish: Callable[[list[SensorForecast]], None]) -> list[str]:
        """Forecast each message through `publish`; learn when it is time. A batch without messages learns what is
        pending. Returns the sensors that drift."""
        spec, table = self.spec, self.table
        drifting: list[str] = []
        if not messages:
            self._learn()
        for wave in split_into_waves(messages):
            rows = table.find_rows([message.sensor for message in wave])
            if not self._pending.keys().isdisjoint(rows.tolist()):
                self._learn()
            values = np.array([message.values for message in wave])
            drifting += self._score(rows, values, np.array([message.time_s for message in wave]))
            earlier, _ = table.read_earlier(rows)
            scaled, moments = observe(values, earlier, table.read_moments(rows), spec.horizon, spec.memory)
            features = scaled.astype(np.float32)
            outputs, state = self._weights.step(features, table.read_state(rows))
            predictions = values[:, 0] + outputs * moments.change_deviations
            table.append(rows, values[:, 0], predictions, features, state, moments)
            answers = zip(wave, predictions.tolist(), strict=True)
            publish([SensorForecast(*each, self.num_updates) for each in answers])
            counts = table.counts[rows]
            due = rows[(counts > spec.horizon) & (counts % spec.learn_every == 0)]
            self._pending.update(dict.fromkeys(due.tolist()))
            if len(self._pending) >= spec.update_sensors:
                self._learn()
        self.num_batches += 1
        return drifting

    def _score(self, rows: np.ndarray, values: np.ndarray, times_s: np.ndarray) -> list[str]:
        """Compare the forecasts of these values [B, D] with them, before anything is learnt from them; returns the
        sensors that drift."""
        totals, counts = self.totals, self.table.counts[rows]
        totals.num_messages += len(rows)
        totals.num_clock_jumps += int((times_s < self.table.last_times_s[rows]).sum())
        self.table.last_times_s[rows] = times_s
        is_due = counts >= self.spec.horizon
        rows, newest = rows[is_due], values[is_due, 0]
        earlier, predictions = self.table.read_earlier(rows)
        errors = np.abs(newest - predictions)
        scaled = errors / self.table.read_moments(rows).change_deviations
        is_judged = counts[is_due] > self.spec.horizon  # the first change is the scale's first value
        scaled = np.minimum(scaled[is_judged], 2 * MAX_DEVIATIONS)
        totals.num_forecasts += len(rows)
        totals.absolute_error += float(errors.sum())
        totals.squared_error += float((errors * errors).sum())
        totals.naive_error += float(np.abs(newest - earlier).sum())
        totals.scaled_error += float(scaled.sum())
        drifting = self.drift.update(rows[is_judged], scaled)
        totals.num_drifts += len(drifting)
        names = self.table.names if len(drifting) else []
        return [names[row] for row in drifting]

    def _learn(self) -> None:
        """Make one update from the windows of the sensors that are pending; none if none is."""
        if not self._pending:
            return
        window = self.table.read_window(np.array(list(self._pending)))
        self._pending = {}
        outputs = self.network.unroll(window.features, window.state)
        losses = nn.functional.huber_loss(outputs, window.targets, reduction="none")
        loss = (losses * window.is_known).sum() / window.is_known.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that further batches depend on."""
        return {
            "spec": self.spec.to_yaml(),
            "network": {name: tensor.clone() for name, tensor in self.network.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "table": self.table.state_dict(),
            "drift": self.drift.state_dict(),
            "totals": vars(self.totals).copy(),
            "counts": [self.num_batches, self.num_updates],
            "pending": list(self._pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the trainer that made `state`. Raises SpecMismatch when that had another spec."""
        learnt = OnlineSpec.from_record(state["spec"])
        for name in OnlineSpec.model_fields:
            if getattr(learnt, name) != getattr(self.spec, name):
                problem = f"the stream was learnt with {getattr(learnt, name)}"
                raise SpecMismatch(f"online.{name}", getattr(self.spec, name), problem, "leave it out, or begin anew")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.table.load_state_dict(state["table"])
        self.drift.load_state_dict(state["drift"])
        self.totals = PrequentialTotals(**state["totals"])
        self.num_batches, self.num_updates = state["counts"]
        self._pending = dict.fromkeys(state["pending"])


def split_into_waves(messages: Sequence[Message]) -> list[list[Message]]:
    """The first message of each sensor, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    waves: list[list[Message]] = []
    for message in messages:
        number = seen[message.sensor]
        seen[message.sensor] += 1
        if number == len(waves):
            waves.append([])
        waves[number].append(message)
    return waves
