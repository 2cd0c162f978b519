"""The online trainer: its answers, scaler and updates against a plain loop over one sensor's whole history."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from stream_case import SMALL, differing_tensors, make_messages
from torch import nn

from shoal.libs.stream.flow import describe_network
from shoal.libs.stream.messages import Message
from shoal.libs.stream.network import MAX_DEVIATIONS, StreamNetwork
from shoal.libs.stream.sensor_table import SensorTable, SilenceDetector, Window
from shoal.libs.stream.spec import OnlineSpec
from shoal.libs.stream.trainer import OnlineTrainer, SensorForecast, _Adam, split_into_waves


def test_a_step_is_one_of_torchs_adam_and_takes_up_its_state() -> None:
    ours, theirs = (nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer, adam = _Adam(ours.parameters(), 0.01), torch.optim.Adam(theirs.parameters(), 0.01, fused=True)
    for step in range(4):
        for network in (ours, theirs):
            network(torch.ones(1, 3) * step).square().sum().backward()
        optimizer.step()
        adam.step()
        adam.zero_grad()
        if step == 1:
            state, optimizer = adam.state_dict(), _Adam(ours.parameters(), 0.01)
            optimizer.load_state_dict(state)
    assert differing_tensors(ours.state_dict(), theirs.state_dict()) == []
    assert differing_tensors(optimizer.state_dict()["state"], adam.state_dict()["state"]) == []


class PlainLearner:
    """The same algorithm as lists of a sensor's full history: no rings, no table, no lstm_cell."""

    def __init__(self, spec: OnlineSpec) -> None:
        self.spec, self.network = spec, OnlineTrainer(spec).network
        self.optimizer = torch.optim.Adam(self.network.parameters(), spec.learning_rate)
        self.values: dict[str, list[float]] = defaultdict(list)
        self.features: dict[str, list[list[float]]] = defaultdict(list)
        self.states: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self.predictions: list[float] = []

    def process(self, messages: list[Message]) -> None:
        """Messages of different sensors."""
        for message in messages:
            self._predict(message.sensor, message.values[0])
        self._learn([message.sensor for message in messages])

    def _predict(self, sensor: str, value: float) -> None:
        history, horizon = self.values[sensor], self.spec.horizon
        history.append(value)
        mean, deviation = np.mean(history), np.sqrt(np.var(history) + 1e-12)
        changes = np.subtract(history[horizon:], history[:-horizon])
        scale = np.sqrt((changes**2).mean() + 1e-12) if len(changes) else 1e-6
        change = changes[-1] / scale if len(changes) else 0.0
        self.features[sensor].append(
            np.clip([(value - mean) / deviation, change], -MAX_DEVIATIONS, MAX_DEVIATIONS).tolist()
        )
        state = self.states[sensor][-1] if self.states[sensor] else None
        with torch.no_grad():
            output, state = self.network.lstm(torch.tensor([[self.features[sensor][-1]]]), state)
            self.predictions.append(value + float(self.network.head(output)) * scale)
        self.states[sensor].append(state)

    def _learn(self, sensors: list[str]) -> None:
        losses, count = [], 0
        for sensor in sensors:
            features, horizon = self.features[sensor], self.spec.horizon
            if len(features) <= horizon or len(features) % self.spec.learn_every:
                continue
            first = max(len(features) - horizon - self.spec.num_steps, 0)
            window = torch.tensor(features[first : len(features) - horizon])[:, None]
            state = self.states[sensor][first - 1] if first else None
            outputs = self.network.head(self.network.lstm(window, state)[0])[:, 0, 0]
            targets = torch.tensor(features[first + horizon :])[:, 1]
            losses.append(nn.functional.huber_loss(outputs, targets, reduction="sum"))
            count += len(targets)
        if losses:
            self.optimizer.zero_grad()
            (torch.stack(losses).sum() / count).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()


@pytest.mark.parametrize("offset", [1.76e9, -1e12])
def test_a_sensor_on_a_large_offset_is_forecast_as_without_it(offset: float) -> None:
    rounded = [replace(each, values=(round(64 * each.values[0]) / 64,)) for each in make_messages(200)]
    moved = [replace(each, values=(each.values[0] + offset,)) for each in rounded]
    found, expected = (process(OnlineTrainer(SMALL), each, 16) for each in (moved, rounded))
    np.testing.assert_allclose(
        [each.prediction - offset for each in found], [each.prediction for each in expected], atol=2e-3
    )


@pytest.mark.parametrize("width", [1, 2])
def test_an_endpoint_takes_float64_histories_on_a_large_offset(width: int) -> None:
    factory, signature = describe_network(OnlineSpec(width=width, hidden=4))
    assert {each.datatype for each in [*signature.inputs, *signature.outputs]} == {"FP64"}
    network = factory.build()
    assert isinstance(network, StreamNetwork)
    torch.nn.init.normal_(network.head.weight)
    shape = (2, 9) if width == 1 else (2, 9, width)
    history = torch.from_numpy(np.random.default_rng(0).integers(0, 640, shape) / 64)
    expected, found = network(history), network(history + 1.76e9)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found - 1.76e9, expected, atol=1e-4, rtol=0)
    assert network(history.float()).dtype == torch.float32  # of a version that declares it


def process(trainer: OnlineTrainer, messages: list[Message], size: int) -> list[SensorForecast]:
    answers: list[SensorForecast] = []
    for at in range(0, len(messages), size):
        trainer.process(messages[at : at + size], answers.extend)
    return answers


def learn_pending(trainer: OnlineTrainer) -> None:
    trainer.process([], lambda answers: None)
    assert trainer.num_pending == 0


@pytest.mark.parametrize(
    ("horizon", "learn_every", "update_sensors", "size"),
    [(1, 1, 16, 3), (3, 1, 16, 3), (2, 4, 16, 3), (1, 1, 3, 1), (1, 1, 100, 1)],
)
def test_answers_and_updates_are_those_of_a_plain_loop(
    horizon: int, learn_every: int, update_sensors: int, size: int
) -> None:
    """Sensors that report one by one share an update as if they had reported together: by their number, or by the next
    message of the first of them."""
    spec = OnlineSpec(
        hidden=5, num_steps=4, horizon=horizon, learn_every=learn_every, update_sensors=update_sensors,
        learning_rate=0.02,
    )  # fmt: skip
    trainer = OnlineTrainer(spec)
    plain = PlainLearner(spec)
    messages = make_messages(90)
    for at in range(0, 90, 3):
        plain.process(messages[at : at + 3])
    answers = process(trainer, messages, size)
    learn_pending(trainer)
    assert 0 <= 90 / 3 / learn_every - trainer.num_updates <= horizon
    # float32 sums in another order, over 30 updates of Adam
    np.testing.assert_allclose([answer.prediction for answer in answers], plain.predictions, rtol=0, atol=2e-4)
    for name, tensor in plain.network.state_dict().items():
        torch.testing.assert_close(trainer.network.state_dict()[name], tensor, rtol=0, atol=2e-4)


@pytest.mark.parametrize("update_sensors", [1, 3, 50])
def test_each_message_is_the_target_of_an_update_and_none_before_its_forecast(
    update_sensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, chance = OnlineSpec(hidden=3, num_steps=2, update_sensors=update_sensors), random.Random(0)
    trainer = OnlineTrainer(spec)
    read_window = SensorTable.read_window
    learnt = set()
    answered = set()

    def read(table: SensorTable, rows: np.ndarray) -> Window:
        for row in rows.tolist():
            last = int(table.counts[row]) - 1
            learnt.update((table.names[row], number) for number in range(max(last - 1, 1), last + 1))
        assert learnt <= answered
        return read_window(table, rows)

    monkeypatch.setattr(SensorTable, "read_window", read)
    counts: Counter[str] = Counter()
    for _ in range(80):
        names = [f"s{chance.randrange(9)}" for _ in range(chance.randrange(5))]
        messages = [Message(name, (chance.random(),), 0.0, "p", 0) for name in names]

        def answer(answers: list[SensorForecast]) -> None:
            for each in answers:
                answered.add((each.message.sensor, counts[each.message.sensor]))
                counts[each.message.sensor] += 1

        trainer.process(messages, answer)
    learn_pending(trainer)
    assert learnt == {each for each in answered if each[1] > 0}  # the first has no forecast to learn from


def test_an_endpoint_answers_a_history_as_the_trainer_answers_a_new_sensor() -> None:
    trainer = OnlineTrainer(OnlineSpec(hidden=5, horizon=2))
    process(trainer, make_messages(60), 3)
    history = [20.0, 21.0, 19.5, 22.0, 22.5, 21.0]
    weights = trainer.network.state_dict()
    fresh = OnlineTrainer(trainer.spec.model_copy(update={"learn_every": 16}))
    fresh.network.load_state_dict(weights)
    answers = process(fresh, [Message("new", (value,), 0.0, "p", at) for at, value in enumerate(history)], 1)
    served = trainer.network(torch.tensor([history]))
    assert served.item() == pytest.approx(answers[-1].prediction, abs=1e-5)
    assert served.item() != pytest.approx(history[-1], abs=1e-5)


def test_a_state_goes_on_to_the_bit_also_as_sensors_join() -> None:
    messages = make_messages(210, num_sensors=70)  # more than the table begins with
    spec = SMALL.model_copy(update={"update_sensors": 20})
    through, halved = OnlineTrainer(spec), OnlineTrainer(spec)
    process(through, messages, 5)
    process(halved, messages[:100], 5)
    assert halved.num_pending > 0
    after = OnlineTrainer(spec)
    after.load_state_dict(halved.state_dict())
    process(after, messages[100:], 5)
    assert differing_tensors(after.state_dict(), through.state_dict()) == []
    assert len(after.table) == 70


def test_a_sensor_that_stops_is_noticed_once_and_so_is_its_return() -> None:
    table = SensorTable(1, 4, 1, 4)
    silence = SilenceDetector()
    told = list[tuple[int, list[str], list[str]]]()
    for now_s in range(60):
        names = ["steady"] * (now_s % 2 == 0) + ["slow"] * (now_s % 8 == 0) + ["once"] * (now_s == 4)
        names += ["failing"] * (now_s % 2 == 0 and not 12 <= now_s < 40)
        rows = table.find_rows(names)
        table.counts[rows] += 1
        stopped, back = silence.update(table, float(now_s))
        told += [(now_s, stopped, back)] * bool(stopped or back)
        assert silence.num_silent == (17 <= now_s < 40)
    assert told == [(17, ["failing"], []), (40, [], ["failing"])]


def test_a_batch_with_several_messages_of_a_sensor_is_taken_in_waves() -> None:
    one, two = make_messages(6, num_sensors=2), make_messages(6, num_sensors=2)
    order = [one[0], one[2], one[1], one[4], one[3], one[5]]
    assert [[message.sequence for message in wave] for wave in split_into_waves(order)] == [[1, 2], [3, 4], [5, 6]]
    waves, batches = OnlineTrainer(SMALL), OnlineTrainer(SMALL)
    waves.process(order, lambda answers: None)
    process(batches, two, 2)
    assert differing_tensors(waves.state_dict()["network"], batches.state_dict()["network"]) == []


def test_the_error_is_of_the_answers_and_the_clock_is_watched() -> None:
    messages = make_messages(40, num_sensors=1)
    trainer = OnlineTrainer(SMALL)
    answers = process(trainer, messages, 1)
    values = np.array([message.values[0] for message in messages])
    errors = np.abs(values[1:] - [answer.prediction for answer in answers[:-1]])
    assert trainer.totals.absolute_error == pytest.approx(errors.sum())
    assert trainer.totals.squared_error == pytest.approx((errors**2).sum())
    assert trainer.totals.naive_error == pytest.approx(np.abs(np.diff(values)).sum())
    assert (trainer.totals.num_messages, trainer.totals.num_forecasts, trainer.totals.num_clock_jumps) == (40, 39, 0)
    process(trainer, [Message("s0", (0.0,), -5.0, "p", 41), Message("s0", (0.0,), 50.0, "p", 42)], 1)
    assert trainer.totals.num_clock_jumps == 1


def test_a_season_is_learnt_and_its_end_is_noticed() -> None:
    trainer = OnlineTrainer(OnlineSpec(learning_rate=0.01))
    wave = np.sin(2 * np.pi * np.arange(600) / 8)
    wave[400:] += np.random.default_rng(0).normal(0, 3.0, 200)
    found: list[int] = []
    for at, value in enumerate(wave):
        drifting = trainer.process([Message("s", (float(value),), float(at), "p", at)], lambda answers: None)
        found += [at] * len(drifting)
        if at == 399:
            assert trainer.totals.absolute_error < 0.3 * trainer.totals.naive_error
    assert found
    assert found[0] >= 400


def test_an_outlier_and_a_constant_leave_the_weights_finite() -> None:
    trainer = OnlineTrainer(SMALL)
    values = [5.0] * 20 + [1e100] + [5.0] * 20
    process(trainer, [Message("s", (value,), 0.0, "p", at) for at, value in enumerate(values)], 1)
    assert all(torch.isfinite(tensor).all() for tensor in trainer.network.state_dict().values())
