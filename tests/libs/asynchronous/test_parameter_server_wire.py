"""What goes between workers and servers: compressed, accumulated, balanced, logged; and what is refused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parameter_server import OPTIMIZERS, TIMEOUT_S, compute_gradients, make_network, running
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from shoal.errors import ConfigError
from shoal.libs.asynchronous.config import ParameterServerConfig
from shoal.libs.asynchronous.parameter_server.compression import (
    Compression,
    GradientCompressor,
    count_payload_bytes,
    decompress,
)
from shoal.libs.asynchronous.parameter_server.controller import BatchBalance, divide_batches
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.train.spec import TrainSpec


def spec_of(**changes: Any) -> ParameterServerConfig:
    return ParameterServerConfig.model_validate(changes)


# -- compression


@pytest.mark.parametrize(("kind", "fraction"), [("fp16", 1.0), ("top_k", 0.05), ("top_k", 1.0)])
def test_what_was_sent_and_the_residual_are_all_gradients(kind: Compression, fraction: float) -> None:
    torch.manual_seed(0)
    size = 200
    sent = torch.zeros(200)
    total = torch.zeros(200)
    compressor, received = GradientCompressor(kind, size, fraction), torch.empty(200)
    for _ in range(30):
        gradient = torch.randn(size)
        total += gradient
        payload = compressor.compress(gradient)
        assert len(payload) == count_payload_bytes(kind, size, fraction)
        decompress(kind, payload, received)
        assert torch.equal(received, gradient)  # what the worker counts as sent is what the server gets
        sent += received
    torch.testing.assert_close(sent + compressor.residual, total, rtol=1e-5, atol=1e-5)


# -- accumulation, balance


@settings(max_examples=100, deadline=None)
@given(seconds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6), each=st.integers(1, 8))
def test_batches_are_divided_so_that_the_last_worker_ends_earliest(seconds: list[float], each: int) -> None:
    times = dict(enumerate(seconds))
    found = divide_batches(each * len(times), times)
    assert sum(found.values()) == each * len(times)
    assert min(found.values()) >= 1
    slowest = max(found, key=lambda worker: found[worker] * times[worker])
    if found[slowest] > 1:  # to move a batch of the last worker elsewhere makes nothing better
        end = found[slowest] * times[slowest]
        assert all((found[other] + 1) * times[other] >= end * (1 - 1e-9) for other in times if other != slowest)


def test_a_worker_that_is_four_times_slower_gets_fewer_batches() -> None:
    balance = BatchBalance(4)
    assert balance.divide([0, 1]) == {0: 4, 1: 4}
    for _ in range(3):
        balance.note(0, 0.01)
        balance.note(1, 0.04)
    assert balance.divide([0, 1]) == {0: 7, 1: 1}  # 70 and 40 ms; 6 and 2 would be 60 and 80
    assert balance.divide([0, 1, 2])[2] >= 1  # one that has just joined


class BalancedWorker(threading.Thread):
    """A worker whose micro-batches sleep."""

    def __init__(self, sync: Any, network: nn.Module, worker: int, sleep_s: float, num_updates: int) -> None:
        super().__init__(daemon=True)
        self._sync = sync
        self._network = network
        self._worker = worker
        self._sleep_s = sleep_s
        self._num_updates = num_updates
        self.num_batches: list[int] = []
        self.ends: list[int] = []

    def run(self) -> None:
        self._sync.begin(0)
        pause = threading.Event()
        steps = 0
        count = 0
        while len(self.num_batches) < self._num_updates:
            self._sync.before_step()
            compute_gradients(self._network, 2 * len(self.ends), self._worker)
            self.ends.append(self._worker)
            pause.wait(self._sleep_s)
            count += 1
            if (now := self._sync.apply_gradients()) > steps:
                self.num_batches.append(count)
                steps, count = now, 0


def test_balanced_workers_compute_all_micro_batches_of_a_step_between_them(tmp_path: Path) -> None:
    spec = spec_of(accumulate=4, balance=True)
    with running(tmp_path, spec, 2, OPTIMIZERS["sgd"]) as (_, make_sync):
        networks = [make_network() for _ in range(2)]
        syncs = [make_sync(worker, OPTIMIZERS["sgd"](networks[worker])) for worker in range(2)]
        workers = [BalancedWorker(syncs[each], networks[each], each, (0.0, 0.1)[each], 3) for each in range(2)]
        for each in workers:
            each.start()
        for each in workers:
            each.join(TIMEOUT_S)
        for sync in syncs:
            sync.close()
    fast, slow = (each.num_batches for each in workers)
    assert (fast[0], slow[0]) == (4, 4)
    assert [sum(pair) for pair in zip(fast, slow, strict=True)] == [8, 8, 8]
    assert slow[-1] < fast[-1]


# -- staleness by the real clock


# -- what is refused


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"backups": 1, "staleness": 2}, "backups"),
        ({"kind": "diloco", "compensation": 0.1}, "compensation"),
        ({"kind": "all_reduce", "compression": "fp16"}, "compression"),
        ({"kind": "all_reduce", "transport": "frames"}, "transport"),
        ({"kind": "local_sgd", "accumulate": 2}, "accumulate"),
        ({"balance": True}, "balance"),
        ({"balance": True, "accumulate": 4, "staleness": 1}, "balance"),
        ({"top_k": 0.0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"servers": 0}, "servers"),
        ({"compression": "gzip"}, "compression"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainSpec.parse({"sync": {"kind": "parameter_server", **changes}})


@pytest.mark.parametrize("kind", [LBFGS, SparseAdam])
def test_an_optimizer_that_cannot_be_divided_is_refused(kind: type[Optimizer]) -> None:
    """L-BFGS evaluates the loss, which a server cannot; the other takes sparse gradients alone."""
    with pytest.raises(ConfigError, match=rf"sync\.kind.*{kind.__name__}"):
        ParameterServer(0, kind(make_network().parameters()), spec_of(), 1)
