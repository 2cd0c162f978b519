"""Live bytes and bytes sent, against what was allocated and sent by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.cost.measure.memory import MemoryGrowth, bytes_of, track_growth
from shoal.cost.measure.op_counter import count_ops

CPU = torch.device("cpu")
KIB = 1024


def test_views_cost_nothing_and_what_is_dropped_is_free_again() -> None:
    held = torch.zeros(KIB)
    with count_ops([held]) as reading:
        first = held.view(32, 32) + 1
        del first
        second = held + 2
        second[:10].mul_(3)
    assert (reading.resident_bytes, reading.peak_bytes) == (4 * KIB, 8 * KIB)
    assert reading.saved_bytes == 0


def test_activations_are_what_waits_for_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with count_ops(model.parameters()) as reading:
        model(torch.zeros(8, 16)).sum().backward()
    tanh = 8 * 16 * 4
    outputs = 8 * 16 * 4
    loss = 4
    assert tanh <= reading.saved_bytes <= tanh + outputs + 2 * loss
    assert reading.peak_bytes >= reading.resident_bytes + reading.saved_bytes


def test_storages_that_are_resized_in_place_are_followed() -> None:
    with count_ops() as reading:
        storage = torch.zeros(KIB).untyped_storage()
        storage.resize_(0)
        storage.resize_(16 * KIB)
    assert reading.peak_bytes == 16 * KIB


def test_the_allocator_tells_of_what_is_inside_of_operators() -> None:
    before = torch.zeros(4 * KIB)
    with track_growth(CPU) as grown:
        after = before + 1
        del before
        after.sort()
    assert grown.peak_bytes >= 3 * 16 * KIB  # the sum, the values, and indices of twice the size
    grown = MemoryGrowth()
    grown.compute_peak([(1.0, 100), (2.0, 16), (2.0, -16)])
    assert grown.peak_bytes == 116, "in their order within one tick of the clock"
    assert bytes_of([after, after[1:], after.view(2, -1)]) == 16 * KIB


def test_a_mapped_file_is_no_memory_of_the_allocator(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(1024 * KIB))
    with track_growth(CPU) as grown, count_ops(grown) as reading:
        kept = torch.from_file(str(tmp_path / "values"), size=256 * KIB)
        dropped = torch.from_file(str(tmp_path / "values"), size=256 * KIB)
        del dropped
        made = kept[:KIB] + 1
        second = made + 1
    assert reading.peak_bytes == made.nbytes + second.nbytes
    assert grown.peak_bytes == pytest.approx(reading.peak_bytes, abs=100)  # with what operators take for scalars
    assert reading.resident_bytes == 0


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_bytes_of_collectives_are_those_of_a_ring() -> None:
    whole, part = torch.zeros(4 * KIB), torch.zeros(KIB)
    share = 3 / 4 * 16 * KIB

    def sent(call: object, *args: object) -> float:
        with count_ops() as reading:
            result = call(*args)  # type: ignore[operator]
            if isinstance(result, torch.Tensor):
                torch.distributed._functional_collectives.wait_tensor(result)
        return reading.sent_bytes

    assert sent(dist.all_reduce, whole) == 2 * share
    assert sent(dist.all_gather_single, whole, part) == share
    assert sent(dist.reduce_scatter_single, part, whole) == 2 * share  # by Gloo, which reduces all for it
    assert sent(dist.broadcast, whole, 0) == share
    assert sent(lambda: dist.isend(part, 2).wait()) == 4 * KIB
    assert sent(lambda: dist.irecv(part, 2).wait()) == 0
    functional = torch.distributed._functional_collectives
    assert sent(functional.all_reduce, whole, "sum", dist.group.WORLD) == 2 * share
    assert sent(functional.all_gather_single, part, 0, dist.group.WORLD) == share
    pair = dist.new_group([0, 1])
    assert sent(lambda: dist.all_reduce(whole, group=pair)) == 16 * KIB


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_operators_that_take_functions_are_counted_as_unknown() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(each)) for each in range(3))
    with torch.no_grad():
        expected = flex_attention(query, key, value)
        with count_ops() as reading:
            found = flex_attention(query, key, value)
    torch.testing.assert_close(found, expected)
    assert reading.unknown == {"flex_attention": 1}
