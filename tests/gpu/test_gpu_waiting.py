"""How long a step waits for other ranks, by the clock of the stream."""

from __future__ import annotations

import pytest
import torch

from shoal.parallel.comm.collective_timer import CollectiveTimer

pytestmark = pytest.mark.gpu
CYCLES = 100_000_000  # tens of milliseconds on any device


def test_a_stream_that_waits_is_timed_and_the_host_is_not(device: str) -> None:
    if device == "cpu":
        pytest.skip("no streams")
    timer, other = CollectiveTimer(torch.device(device, 0)), torch.cuda.Stream()
    with timer.time_collectives():
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            done = other.record_event()
        torch.cuda.current_stream().wait_event(done)
        torch.ones(8, device=device).sum()
    torch.cuda.synchronize()
    assert 0.005 < timer.waited_s < 5
    before = timer.waited_s
    torch.cuda._sleep(CYCLES)  # outside a step, or computed: not waited for
    torch.cuda.synchronize()
    assert timer.waited_s == before
