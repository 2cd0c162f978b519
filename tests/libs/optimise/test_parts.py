"""The parts of a search: the choice by numbers, a distillation's loss against NumPy, students, exported graphs."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, MissingExtra
from shoal.libs.optimise import measure
from shoal.libs.optimise.choice import MaxDrop, Measurement, RowTotals, choose, find_pareto_front, judge, judge_value
from shoal.libs.optimise.distil import compute_distillation_loss, find_class_axis
from shoal.libs.optimise.request import OptimiseRequest, choose_default_student, choose_steps, parse_student
from shoal.libs.optimise.steps import Model, convert_model
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot


def measured(accuracy: float, latency_s: float, size: int = 1, flops: float | None = 1.0) -> Measurement:
    return Measurement({"accuracy": accuracy, "loss": 1 - accuracy}, latency_s, 10 * latency_s, size, flops)


def test_a_drop_is_of_the_value_or_in_its_unit() -> None:
    assert MaxDrop.parse("1%").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.891)
    assert MaxDrop.parse("0.01").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.89)
    assert MaxDrop.parse("1e-3").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.899)
    assert MaxDrop.parse("10 %").compute_limit(2.0, is_higher_better=False) == pytest.approx(2.2)
    assert MaxDrop.parse("10%").compute_limit(-2.0, is_higher_better=True) == pytest.approx(-2.2)


def test_the_fastest_within_the_drop_is_chosen() -> None:
    models = [measured(0.9, 10), measured(0.895, 6), measured(0.80, 1), measured(0.892, 5)]
    is_within = [True, True, False, True]
    assert choose(models, is_within, "latency") == choose(models, is_within, "batch") == 3
    assert choose(models, [True, False, False, False], "latency") == 0
    assert choose(models, is_within, "size") == 0  # none is smaller
    equal = [measured(0.9, 9, flops=9.0), measured(0.9, 5, flops=3.0), measured(0.9, 2, flops=3.0)]
    assert choose(equal, [True] * 3, "flops") == 2


def test_a_gain_within_the_noise_is_none() -> None:
    assert choose([measured(0.9, 1.0), measured(0.9, 0.97)], [True, True], "latency") == 0
    unknown = [measured(0.9, 1, flops=5.0), measured(0.9, 1, flops=None)]
    assert choose(unknown, [True, True], "flops") == 0


def answers(num_rows: int, wrong: range = range(0)) -> RowTotals:
    totals = np.ones(num_rows)
    totals[list(wrong)] = 0
    return RowTotals(totals, np.ones(num_rows))


def test_two_rows_of_two_hundred_decide_nothing() -> None:
    teacher, student = answers(200), answers(200, range(2))
    found = judge(teacher, student, True, 0.009, 0.95)
    assert (found.drop, found.status, found.num_rows) == (pytest.approx(0.01), "undecided", 200)
    assert found.low < 0 < 0.025 < found.high
    assert judge(teacher, student, True, 0.01, 0.95).more_rows is None  # the drop is the limit
    assert judge(teacher, student, True, 0.01, 0.5).status == "within"
    assert judge(teacher, student, True, 0.009, 0.5).status == "beyond"
    assert judge(teacher, answers(200, range(20)), True, 0.05, 0.95).status == "beyond"
    assert judge(answers(200, range(20)), teacher, True, 0.0, 0.95).status == "within"
    assert judge_value(math.nan, 0.1).status == "beyond"


@pytest.mark.parametrize("is_share", [True, False])
def test_as_many_more_rows_as_are_said_decide(is_share: bool) -> None:
    def draw(num_rows: int) -> tuple[RowTotals, RowTotals]:
        """Rows that are like those before."""
        if is_share:
            return answers(num_rows), answers(num_rows, range(num_rows // 50))
        copies = -(-num_rows // 50)
        totals, noise = (np.tile(np.random.default_rng(at).normal(size=50), copies)[:num_rows] for at in (0, 1))
        return RowTotals(totals, np.full(num_rows, 2.0)), RowTotals(totals + noise * 0.5, np.full(num_rows, 2.0))

    allowed = judge(*draw(100), is_share, 0.0, 0.5).drop + 0.03
    first = judge(*draw(100), is_share, allowed, 0.95)
    assert first.status == "undecided"
    assert first.more_rows is not None
    total = 50 * math.ceil((100 + first.more_rows) / 50)
    assert judge(*draw(total), is_share, allowed, 0.95).status != "undecided"
    assert judge(*draw(total - 100), is_share, allowed, 0.95).status == "undecided"


@pytest.mark.parametrize(("worse", "better", "num_rows"), [(0, 0, 60), (3, 0, 60), (0, 2, 60), (7, 4, 90)])
def test_the_interval_of_shares_is_where_the_score_statistic_is_the_quantile(
    worse: int, better: int, num_rows: int
) -> None:
    teacher, student = answers(num_rows, range(better)), answers(num_rows, range(better, better + worse))
    found = judge(teacher, student, True, 0.0, 0.975)
    for drop in (found.low, found.high):
        shares = np.linspace(max(0.0, -drop), (1 - drop) / 2, 400_001)  # of rows that the student alone has right
        with np.errstate(divide="ignore", invalid="ignore"):
            counts = (worse, better, num_rows - worse - better)
            parts = (shares + drop, shares, 1 - 2 * shares - drop)
            likelihood = sum(count * np.log(part) if count else 0.0 for count, part in zip(counts, parts, strict=True))
        best = shares[np.nanargmax(np.broadcast_to(likelihood, shares.shape))]
        statistic = (worse - better - num_rows * drop) / math.sqrt(num_rows * (2 * best + drop - drop**2))
        assert abs(statistic) == pytest.approx(1.959964, abs=1e-3)


def test_the_front_has_what_no_other_beats() -> None:
    models = [measured(0.9, 10), measured(0.8, 1), measured(0.85, 12), measured(0.85, 5), measured(math.nan, 0.1)]
    assert find_pareto_front(models, "accuracy", True, "latency") == [1, 3, 0]
    assert find_pareto_front(models, "loss", False, "latency") == [1, 3, 0]


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return shares


def test_the_loss_is_the_divergence_of_softened_classes() -> None:
    random = np.random.default_rng(0)
    mine, theirs = random.standard_normal((2, 5, 7, 4))  # [B, T, C]
    p, q = softmax(theirs / 3.0), softmax(mine / 3.0)
    expected = 9.0 * (p * (np.log(p) - np.log(q))).sum(-1).mean()
    outputs, answers = torch.from_numpy(mine).float(), torch.from_numpy(theirs).float()
    found = compute_distillation_loss(outputs, answers, torch.zeros(5, 7, dtype=torch.int64), 3.0)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    outputs, answers = (each.movedim(-1, 1).unsqueeze(-1) for each in (outputs, answers))  # [B, C, T, 1]
    found = compute_distillation_loss(outputs, answers, torch.zeros(5, 7, 1, dtype=torch.int64), 3.0)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_other_numbers_are_compared_by_their_squares_and_several_outputs_add_up() -> None:
    ones, zeros = torch.ones(4, 2), torch.zeros(4, 2)
    assert compute_distillation_loss(ones, zeros, torch.zeros(4, 2), 2.0).item() == 1.0
    mine, theirs = {"a": ones, "b": 2 * ones}, {"a": zeros, "b": zeros}
    assert compute_distillation_loss(mine, theirs, None, 2.0).item() == 5.0
    with pytest.raises(ConfigError, match="nothing to learn from"):
        compute_distillation_loss(torch.ones(3, dtype=torch.int64), torch.ones(3), None, 2.0)


@pytest.mark.parametrize(
    ("outputs", "targets", "axis"),
    [
        *(((8, 10), (8,), -1), ((8, 64, 256), (8, 65), -1), ((8, 3, 20, 20), (8, 20, 20), 1), ((8, 10), (8, 10), None)),
        *(((8, 3, 64), (8, 64), 1), ((8, 3, 3), (8, 3), -1)),  # as nn.CrossEntropyLoss has them; as text has
        *(((8, 1), (8,), None), ((8, 1, 20, 20), (8, 20, 20), None)),  # one logit has no distribution
    ],
)
def test_the_axis_of_classes_follows_from_the_labels(
    outputs: tuple[int, ...], targets: tuple[int, ...], axis: int | None
) -> None:
    assert find_class_axis(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64)) == axis
    assert find_class_axis(torch.zeros(outputs), torch.zeros(targets)) is None


def test_a_student_is_the_teacher_with_other_arguments() -> None:
    teacher = ModelFactory(factory="shoal.models.lenet:LeNet", kwargs={"num_classes": 7})
    assert parse_student("narrow=3", teacher).factory.kwargs == {"num_classes": 7, "narrow": 3}
    found = choose_default_student(teacher, None)
    assert found.factory.kwargs == {"num_classes": 7, "narrow": 2}
    decoder = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs={"width": 128})
    found = choose_default_student(decoder, None)
    assert found.factory.kwargs == {"width": 64}
    assert choose_default_student(ModelFactory(factory="torch.nn:Identity"), None) is None


@pytest.mark.parametrize("text", ["", "=3", "hidden", "hidden=1,2", "a b=3", ":Net", "net.py:3"])
def test_what_is_no_student_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--student"):
        parse_student(text, ModelFactory(factory="shoal.models.lenet:LeNet"))


def test_steps_without_their_libraries_are_left_out_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    lines: list[str] = []
    assert choose_steps(OptimiseRequest("m"), lines.append) == ["int8", "bf16"]
    assert [line.partition(":")[0] for line in lines] == ["no onnx", "no onnx-int8"]
    assert choose_steps(OptimiseRequest("m", steps=("int8", "int8")), lines.append) == ["int8"]
    with pytest.raises(MissingExtra, match=r"CHECKOUT\[export\]"):
        choose_steps(OptimiseRequest("m", steps=("onnx",)), lines.append)


class Scores(nn.Module):
    """kind: the form of its outputs, in an order that is not the alphabet's."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, right: Tensor, left: Tensor) -> Any:
        scores = self.linear(right - left)
        by_kind = {"tensor": scores, "tuple": (scores, scores / 2), "dict": {"scores": scores, "half": scores / 2}}
        return by_kind[self.kind]


class Forgetful(Scores):
    def forward(self, right: Tensor, left: Tensor) -> Any:
        return self.linear(left)


class Silent(Scores):
    """Raises an error without a message where a tracer calls it."""

    def forward(self, right: Tensor, left: Tensor) -> Any:
        if torch.jit.is_tracing():
            raise NotImplementedError
        return super().forward(right, left)


def describe(*names: str, size: int) -> list[TensorSignature]:
    return [TensorSignature(name=name, datatype="FP32", shape=[-1, size]) for name in names]


INPUTS = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


def export(network: nn.Module, signature: Signature, **kwargs: Any) -> Model:
    factory = ModelFactory(factory=f"{__name__}:{type(network).__name__}", kwargs=kwargs)
    payload = safetensors.torch.save(network.state_dict())
    return convert_model(Model((), factory, payload), "onnx", factory, signature, INPUTS)


@pytest.mark.parametrize(("kind", "names"), [("tensor", ["y"]), ("tuple", ["z", "y"]), ("dict", ["scores", "half"])])
def test_a_graph_gives_what_its_module_gives_by_the_names_of_the_endpoint(kind: str, names: list[str]) -> None:
    torch.manual_seed(0)
    network = Scores(kind)
    signature = Signature(inputs=describe("right", "left", size=4), outputs=describe(*names, size=3))
    model = export(network, signature, kind=kind)
    predictor = Predictor(model.factory, signature, ModelOptions())
    loaded = predictor.load(WeightSnapshot.from_payload(1, model.payload))
    (found,) = loaded.predict_batch([{"right": INPUTS[0].numpy(), "left": INPUTS[1].numpy()}])
    assert isinstance(found, dict)
    scores = network.linear(INPUTS[0] - INPUTS[1]).detach().numpy()
    np.testing.assert_allclose(found[names[0]], scores, rtol=1e-5)
    if kind != "tensor":
        np.testing.assert_allclose(found[names[1]], scores / 2, rtol=1e-5)
    example = network(*INPUTS)
    measured = measure.ServedNetwork(measure.open_forward(model, signature), signature, example)(*INPUTS)
    assert type(measured) is type(example)
    torch.testing.assert_close(measured, example, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("network", "problem"), [(Forgetful(), "takes left alone"), (Silent(), "cannot convert it: NotImplementedError")]
)
def test_a_graph_that_cannot_be_written_is_rejected_with_the_reason(network: nn.Module, problem: str) -> None:
    signature = Signature(inputs=describe("right", "left", size=4), outputs=describe("y", size=3))
    with pytest.raises(ConfigError, match=problem):
        export(network, signature)
