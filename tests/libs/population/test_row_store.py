"""Rows that are staged on a CUDA device, without one: streams that run as late or as early as events allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.libs.population import row_store
from shoal.libs.population.member_rows import MemberRows, RowLayout
from shoal.libs.population.row_store import RowStore

MEMBERS, SLOTS = 7, 2


class FakeDevice:
    """Streams in the order of their creation, which is the order in which they run what they may: 0 is computed on.

    Nothing runs before a stream is synchronised; then all that was launched on any stream may run.
    """

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.lock = threading.Lock()
        self.computing = FakeStream(self)
        self.thread = threading.local()

    def current(self, _: object = None) -> FakeStream:
        return getattr(self.thread, "stream", self.computing)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        self.thread.stream = stream
        yield
        self.thread.stream = self.computing

    def launch(self, work: Callable[[], object]) -> None:
        self.current().add(work)

    def drain(self, stream: FakeStream) -> None:
        """The streams of copies go first: what no event holds back happens too early."""
        with self.lock:
            while stream.waiting:
                ahead = [*self.streams[1:], self.computing]
                assert any(each.run_one() for each in ahead), "the streams wait for each other"


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.waiting = device, list[tuple[FakeEvent | None, int, Callable[[], object]]]()
        device.streams.append(self)

    def add(self, work: Callable[[], object], event: FakeEvent | None = None, count: int = 0) -> None:
        with self.device.lock:
            self.waiting.append((event, count, work))

    def run_one(self) -> bool:
        if not self.waiting or ((event := self.waiting[0][0]) is not None and event.done < self.waiting[0][1]):
            return False
        self.waiting.pop(0)[2]()
        return True

    def wait_event(self, event: FakeEvent) -> None:
        self.add(lambda: None, event, event.recorded)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device.drain(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.recorded = 0
        self.done = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded += 1
        (stream or self.device.current()).add(lambda count=self.recorded: setattr(self, "done", count))  # type: ignore[misc]

    def wait(self) -> None:
        self.device.current().wait_event(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(fake))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    copy = row_store._copy
    monkeypatch.setattr(row_store, "_copy", lambda *of: fake.launch(lambda: copy(*of)))

    def make_rows(layout: RowLayout, num_members: int, *_: object, **__: object) -> MemberRows:
        return MemberRows(layout, num_members)

    monkeypatch.setattr(row_store, "MemberRows", make_rows)
    return fake


@pytest.fixture
def store(device: FakeDevice) -> Iterator[RowStore]:
    made = RowStore(RowLayout(nn.Linear(2, 1)), MEMBERS, (), torch.device("cuda"), resident=SLOTS)
    made.rows.weights.copy_(torch.arange(MEMBERS)[:, None])
    yield made
    made.close()


def run_pass(store: RowStore, device: FakeDevice, kernel: Callable[[Tensor], Any], *, is_changed: bool) -> list[Any]:
    """What a kernel returns for each member."""
    found: list[Any] = []
    parts = [(member, 1) for member in range(MEMBERS)]
    with store.loading(parts):
        for part in parts:
            with store.open(part, is_changed=is_changed) as rows:
                device.launch(lambda weights=rows.weights: found.append(kernel(weights)))  # type: ignore[misc]
    device.computing.synchronize()
    return found


def test_no_load_overwrites_rows_that_an_evaluation_still_reads(store: RowStore, device: FakeDevice) -> None:
    for _ in range(3):
        assert run_pass(store, device, lambda weights: float(weights[0, 0]), is_changed=False) == list(range(MEMBERS))


def test_rows_are_read_as_stored_in_the_pass_before(store: RowStore, device: FakeDevice) -> None:
    for number in range(1, 4):
        run_pass(store, device, lambda weights: weights.add_(10), is_changed=True)
        expected = [member + 10 * number for member in range(MEMBERS)]
        assert run_pass(store, device, lambda weights: float(weights[0, 0]), is_changed=False) == expected
        assert store.rows.weights[:, 0].tolist() == expected


def test_a_closed_chunk_is_in_host_memory_while_others_are_under_way(store: RowStore, device: FakeDevice) -> None:
    with store.loading([(0, 1), (1, 1)]):
        with store.open((0, 1)) as rows:
            device.launch(lambda: rows.weights.add_(10))
        assert store.rows.weights[0, 0] == 10


def test_a_chunk_that_fails_is_read_to_its_end(store: RowStore, device: FakeDevice) -> None:
    found: list[float] = []

    def fail(weights: Tensor) -> None:
        device.launch(lambda: found.append(float(weights[0, 0])))
        raise ValueError("fails")

    with store.loading([(member, 1) for member in range(4)]):
        opened = store.open((0, 1))
        with pytest.raises(ValueError, match="fails"), opened as rows:
            fail(rows.weights)
    assert run_pass(store, device, lambda weights: float(weights[0, 0]), is_changed=False) == list(range(MEMBERS))
    assert found == [0.0]
