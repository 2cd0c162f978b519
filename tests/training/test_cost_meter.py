"""What a step costs, against counts by hand, and in a running Trainer: arithmetic, live bytes, bytes sent, and
times."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from shoal.cost import CostTable
from shoal.cost.cost_table import combine_ranks, format_quantity, relative_error
from shoal.cost.measure.memory import MemoryGrowth, bytes_of, measure_growth
from shoal.cost.measure.op_counter import OpCounts, count_ops
from shoal.cost.step_profiler import (
    MAX_MORE,
    MIN_TIMED_S,
    NUM_TIMED,
    NUM_WARM_UP,
    StepProfiler,
    TimedStep,
    compute_bubble,
    profile_step,
)
from shoal.data import Data
from shoal.data.loader import load_first_batch
from shoal.libs.trees import ChildSumLSTMCell, NaryLSTMCell, TreeBatch, TreeRNN
from shoal.parallel import World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.train import Task, TrainSpec
from shoal.train.optim.ema import WeightAverage
from shoal.train.optim.optimizers import make_optimizer

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
    with measure_growth(CPU) as grown:
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
    with measure_growth(CPU) as grown, count_ops(grown) as reading:
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


def read(module: nn.Module, *inputs: Tensor) -> OpCounts:
    with count_ops() as reading:
        outputs = module(*inputs)
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    return reading


def torchs_count_on_meta(module: nn.Module, *inputs: Tensor) -> int:
    """What torch says where it decomposes everything: an independent count."""
    with FlopCounterMode(display=False) as counter:
        module.to("meta")(*(each.to("meta") for each in inputs))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_recurrent_layers_count_as_on_meta(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    inputs = torch.randn(3, 7, 4, requires_grad=True)
    reading = read(kind(4, 5, **options), inputs)
    assert reading.flops_forward == torchs_count_on_meta(kind(4, 5, **options), inputs.detach()) > 0
    assert (
        1.7 * reading.flops_forward <= reading.flops_backward <= 2 * reading.flops_forward
    )  # the first state is given
    assert not reading.unknown


def test_layers_by_hand() -> None:
    assert read(nn.Linear(8, 5), torch.randn(3, 8, requires_grad=True)).flops == 3 * (2 * 3 * 8 * 5)
    assert read(nn.Bilinear(3, 4, 5), torch.randn(2, 3), torch.randn(2, 4)).flops_forward == 3 * 2 * 3 * 4 * 5
    convolution = read(nn.Conv2d(2, 3, 5), torch.randn(4, 2, 9, 9))
    assert convolution.flops_forward == 2 * 4 * 3 * (5 * 5) * (2 * 5 * 5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_gradient_of_a_convolution_counts_as_its_forward_pass(groups: int, transposed: bool) -> None:
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 8, 3, stride=2, groups=groups)
    places = 7 * 7 if transposed else 3 * 3  # every weight is used once at each of them
    forward = 2 * 5 * places * (4 * 8 // groups * 3 * 3)
    images = torch.randn(5, 4, 7, 7)
    first = read(layer, images)  # nobody asks for the images' gradient
    assert (first.flops_forward, first.flops_backward) == (forward, forward)
    within = read(layer, images.requires_grad_())
    assert (within.flops_forward, within.flops_backward) == (forward, 2 * forward)
    frozen = read(layer.requires_grad_(False), images)
    assert (frozen.flops_forward, frozen.flops_backward) == (forward, forward)


def test_fused_attention_counts_like_its_two_products() -> None:
    query = torch.randn(2, 3, 8, 4, requires_grad=True)
    with count_ops() as reading:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert reading.flops_forward == 2 * (2 * 2 * 3 * 8 * 8 * 4)
    assert reading.flops_backward == 2.5 * reading.flops_forward  # the scores are computed again


def test_products_with_vectors_and_distances_are_not_nothing() -> None:
    matrix, vector = torch.randn(6, 4), torch.randn(4)
    with count_ops() as reading:
        torch.mv(matrix, vector)
        torch.dot(vector, vector)
    assert reading.flops == 2 * 6 * 4 + 2 * 4
    with count_ops() as reading:
        torch.cdist(matrix, matrix, p=1.0)
    assert reading.flops == 3 * 6 * 6 * 4
    many, others = torch.randn(30, 4, requires_grad=True), torch.randn(40, 4)
    with count_ops() as reading:  # past 25 points by one matrix product, of points with two more columns
        torch.cdist(many, others).sum().backward()
    assert reading.flops_forward == 2 * 30 * 40 * (4 + 2)
    assert reading.flops_backward > 0
    with count_ops() as reading:
        torch._addmm_activation(torch.zeros(40), matrix, others.T)
    assert reading.flops == 2 * 6 * 4 * 40


def test_norms_and_sparse_gradients_multiply_nothing() -> None:
    rows = torch.randn(4, 8, requires_grad=True)
    similarity = read(nn.CosineSimilarity(), rows, torch.randn(4, 8))
    with count_ops() as reading:
        (nn.functional.normalize(rows) + rows.norm()).sum().backward()
    looked_up = read(nn.Embedding(6, 2, sparse=True), torch.tensor([1, 1]))
    assert similarity.flops == reading.flops == looked_up.flops == 0
    assert not (similarity.unknown | reading.unknown | looked_up.unknown)


def test_products_that_are_added_up_and_convolutions_over_time() -> None:
    left, right = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6)
    with count_ops() as reading:
        torch.addbmm(torch.zeros(4, 6), left, right).sum().backward()
    assert reading.flops_forward == 2 * 3 * 4 * 5 * 6
    assert reading.flops_backward == 2 * 3 * 4 * 5 * 6
    times, weight = torch.randn(9, 2, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    with count_ops() as reading:
        torch.conv_tbc(times, weight, torch.zeros(5)).sum().backward()
    assert reading.flops_forward == 2 * (7 * 2 * 5) * (3 * 4)
    assert reading.flops_backward == 2 * reading.flops_forward
    assert not reading.unknown
    with count_ops() as reading, torch.no_grad():
        torch.zeros(4, 6).addmm_(left[0], right[0])
        torch.zeros(4).addmv_(left[0], torch.randn(5))
    assert reading.flops == 2 * 4 * 5 * 6 + 2 * 4 * 5


def test_what_torch_does_in_one_operator_is_unknown() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    with count_ops() as reading, torch.no_grad():
        layer(torch.randn(2, 3, 8))
        layer.self_attn(*(3 * (torch.randn(2, 3, 8),)))
    with count_ops() as distances:
        nn.functional.pdist(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert set(reading.unknown) == {"aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention"}
    assert set(distances.unknown) == {"aten._pdist_forward", "aten._pdist_backward"}


@torch.library.custom_op("shoal_test::secret", mutates_args=())
def secret(value: Tensor) -> Tensor:
    return value @ value


def test_an_operator_that_nobody_knows_is_named_and_so_is_a_decomposition() -> None:
    with count_ops() as reading:
        torch.ops.shoal_test.secret(torch.eye(3))
        torch.linalg.qr(torch.eye(3))
    assert set(reading.unknown) == {"shoal_test.secret", "aten.linalg_qr"}


def test_trees_are_counted_as_torch_would_compute_them() -> None:
    """Their function in NumPy is invisible to the counter, which would see its arrays come and go."""
    N = 9
    n = 4
    E = 7
    D = 3
    H = 5
    trees = TreeBatch.from_parents([[-1, 0, 0, 1, 1, 2, 2], [-1, 0]])
    for cell, of_children in (
        (ChildSumLSTMCell(D, H), E * H * H + n * H * 3 * H),
        (NaryLSTMCell(D, H, max_arity=2), 3 * (2 * H * 5 * H) + H * 4 * H),  # one node has one child
    ):
        x = torch.randn(N, D, requires_grad=True)
        with count_ops() as reading:
            TreeRNN(cell)(x, trees).sum().backward()
        assert reading.flops_forward == 2 * (N * D * 4 * H + of_children)
        assert reading.flops_backward == 2 * reading.flops_forward
        assert not reading.unknown
        assert reading.saved_bytes > 4 * N * 6 * H  # the gates, c and h


# -- steps of a running Trainer: a few are measured; tables travel and merge


WIDTH, BATCH = 32, 16
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH + 4
FORWARD = 2 * (3 * WIDTH * WIDTH + 4 * WIDTH)


class Blocks(Task):
    """Four layers that can be replicated, sharded, split and cut."""

    def __init__(self, *, samples: int = 64) -> None:
        self.samples = samples

    def model(self) -> nn.Module:
        layers = [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    def data(self) -> Data:
        return Data(TensorDataset(torch.randn(self.samples, WIDTH), torch.randint(0, 4, (self.samples,))))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def pipeline_cuts(self) -> list[str]:
        return ["3"]


def probed(num_metered: int = 1) -> tuple[ParallelModel, Optimizer, Any, StepProfiler]:
    """The model of Blocks in one process, its optimiser, a batch, and a probe of its steps."""
    task = Blocks()
    spec = TrainSpec(batch_size=BATCH)
    world = World.single("cpu")
    batch = load_first_batch(task.data(), BATCH, world.device)
    model = parallelize(task.model(), task, spec.parallel, spec.resolve_dims(), world, batch)
    optimizer = make_optimizer(task, spec.optimizer, [parameter for _, parameter in model.named_parameters()])
    return model, optimizer, batch, StepProfiler(model, optimizer, world, num_metered)


def test_a_probe_measures_an_average_of_the_weights() -> None:
    model, optimizer, batch, _ = probed()
    averaged = WeightAverage(model, 0.9)
    with profile_step(model, optimizer, averaged.tensors) as found:
        model.train_step(batch, 0)
    assert found.values["memory_average"] == 4 * PARAMETERS
    with profile_step(model, optimizer) as without:
        model.train_step(batch, 1)
    assert found.values["memory_peak"] == without.values["memory_peak"] + 4 * PARAMETERS


def test_of_long_steps_a_few_are_timed() -> None:
    model, _, batch, probe = probed()
    for step in range(NUM_WARM_UP + NUM_TIMED + 1):
        assert not probe.is_due
        with probe.step():
            model.train_step(batch, step)
            time.sleep(1.1 * MIN_TIMED_S / NUM_TIMED if NUM_WARM_UP <= step < NUM_WARM_UP + NUM_TIMED else 0.0)
    assert probe.is_due
    assert probe.collect_table()["step_s"] >= 1.1 * MIN_TIMED_S / NUM_TIMED
    assert probe.is_done
    assert not probe.is_due


def test_of_short_steps_more_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cost.step_profiler.MIN_TIMED_S", 1e6)
    model, _, batch, probe = probed()
    due = []
    for step in range(NUM_WARM_UP + NUM_TIMED + 1 + MAX_MORE + 1):
        with probe.step():
            model.train_step(batch, step)
        if probe.is_due:
            due.append(step)
            probe.collect_table()
    assert due == [NUM_WARM_UP + NUM_TIMED, NUM_WARM_UP + NUM_TIMED + MAX_MORE]
    assert probe.is_done


def test_steps_that_are_not_alike_are_averaged() -> None:
    """Every other one has no backward pass: the FLOPs are those of a mean step, the memory that of the largest."""
    model, _, batch, probe = probed(num_metered=4)
    for step in range(NUM_WARM_UP + NUM_TIMED + 4):
        assert not probe.is_due
        with probe.step():
            if step % 2:
                model.train_step(batch, step)
            else:
                with torch.no_grad():
                    model.modules[0](*Blocks().inputs(batch))
    assert probe.is_due
    measured, step = probe.collect_table(), 3 * FORWARD - 2 * WIDTH * WIDTH  # nothing asks for the inputs' gradient
    assert measured["flops_step"] == pytest.approx(BATCH * (step + FORWARD) / 2)
    assert measured["memory_activations"] > 4 * BATCH * 3 * WIDTH  # of the largest step


def test_a_rank_that_leaves_the_schedule_early_waits_all_the_same() -> None:
    """Four micro-batches of 1 s forward and 2 s backward in two stages: the last rank is done 2 s before the first."""
    first, last = TimedStep(0, 16.0, 12.0, 15.0), TimedStep(0, 16.0, 12.0, 13.0)
    assert compute_bubble([first, last]) == pytest.approx(0.2)  # as 1F1B is simulated, too
    slower = TimedStep(1, 16.0, 24.0, 30.0)  # another pipeline, whose ranks wait for each other only
    assert compute_bubble([first, last, slower, slower]) == pytest.approx(0.2)


def test_tables_travel_and_merge() -> None:
    found = CostTable({"memory_peak": 3.0, "bubble": float("nan")}, unknown=("aten.x",), cuts=("3",))
    assert CostTable.from_details({**found.to_details(), "later": 1}) == CostTable(
        {"memory_peak": 3.0}, ("aten.x",), (), ("3",)
    )
    assert combine_ranks({0: {"flops_rank": 2.0}, 1: {"flops_rank": 3.0}}) == {"flops_step": 5.0, "flops_rank": 3.0}
    assert (relative_error(1.1, 1.0), relative_error(0.0, 0.0)) == (pytest.approx(0.1), 0.0)
    words = [
        format_quantity(3 << 20, "bytes"),
        format_quantity(2.5e9, "operations"),
        format_quantity(0.0021, "seconds"),
        format_quantity(0.25, "share"),
    ]
    assert words == ["3 MiB", "2.5 GFLOP", "2.1 ms", "25%"]
