"""A stream in memory for tests: a broker that delivers again what was not acknowledged, and messages to put into it."""

import math
import random
from pathlib import Path

import torch

from shoal.libs.stream.batch_log import read_batches
from shoal.libs.stream.messages import Message
from shoal.libs.stream.spec import OnlineSpec
from shoal.libs.stream.trainer import OnlineTrainer
from shoal.sources.source import Delivery, MalformedPayload, StreamState

SMALL = OnlineSpec(hidden=4, num_steps=3, update_sensors=2, seed=7)


def make_messages(count: int, num_sensors: int = 3, publisher: str = "p") -> list[Message]:
    """Of one publisher, one sensor after the other; sequences from 1."""
    noise = random.Random(count)
    return [
        Message(f"s{at % num_sensors}", (math.sin(at / 5) + noise.gauss(0, 0.1),), float(at), publisher, at + 1)
        for at in range(count)
    ]


class FakeBroker:
    """Has the messages that no session has acknowledged, in order."""

    def __init__(self, messages: list[Message | MalformedPayload]) -> None:
        self.waiting = list(messages)


class FakeSource:
    """A session with a FakeBroker. Polls are of random size, some empty; every fifth message comes twice."""

    def __init__(self, broker: FakeBroker, seed: int = 0) -> None:
        self._broker, self._random = broker, random.Random(seed)
        self._queue: list[Message | MalformedPayload] = []
        self._delivered: list[Message | MalformedPayload] = []
        self._num_committed = 0

    @property
    def num_delivered(self) -> int:
        return len(self._delivered)

    @property
    def is_exhausted(self) -> bool:
        return not self._queue

    def example(self) -> Message:
        return next(each for each in self._broker.waiting if isinstance(each, Message))

    def open(self, state: StreamState) -> None:
        self._queue = [each for each in self._broker.waiting for _ in range(1 + (self._random.random() < 0.2))]

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        size = self._random.randint(0, max_messages)
        taken, self._queue = self._queue[:size], self._queue[size:]
        self._delivered += taken
        messages = [each for each in taken if isinstance(each, Message)]
        return Delivery(messages, [each for each in taken if isinstance(each, MalformedPayload)])

    def commit(self, state: StreamState) -> None:
        for each in self._delivered[self._num_committed : state.num_delivered]:
            if each in self._broker.waiting:
                self._broker.waiting.remove(each)
        self._num_committed = state.num_delivered

    def close(self) -> None:
        self._queue = []


def relearn(folder: Path, spec: OnlineSpec = SMALL) -> OnlineTrainer:
    """An undisturbed trainer that has learnt the batches of a run's log."""
    trainer = OnlineTrainer(spec)
    for batch in read_batches(folder / "log"):
        trainer.process(batch.messages, lambda answers: None)
    return trainer


def differing_tensors(first: object, second: object, name: str = "state") -> list[str]:
    """The names of values that differ in two nested states, tensors to the bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [name]
    if isinstance(first, dict) and isinstance(second, dict):
        unequal = [name] if first.keys() != second.keys() else []
        return unequal + [
            each
            for key in first.keys() & second.keys()
            for each in differing_tensors(first[key], second[key], f"{name}.{key}")
        ]
    return [] if first == second else [name]
