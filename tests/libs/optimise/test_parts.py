"""The parts of a search: the choice by numbers, the loss of a distillation against NumPy, students as given."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError, MissingExtra
from shoal.libs.optimise.choice import MaxDrop, Measurement, choose, find_front
from shoal.libs.optimise.distil import compute_distillation_loss, find_class_axis
from shoal.libs.optimise.request import OptimiseRequest, choose_steps
from shoal.libs.optimise.student import choose_default_student, parse_student
from shoal.registry import ModelFactory


def measured(accuracy: float, latency_s: float, size: int = 1, flops: float | None = 1.0) -> Measurement:
    return Measurement({"accuracy": accuracy, "loss": 1 - accuracy}, latency_s, 10 * latency_s, size, flops)


def test_a_drop_is_of_the_value_or_in_its_unit() -> None:
    assert MaxDrop.parse("1%").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.891)
    assert MaxDrop.parse("0.01").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.89)
    assert MaxDrop.parse("1e-3").compute_limit(0.9, is_higher_better=True) == pytest.approx(0.899)
    assert MaxDrop.parse("10 %").compute_limit(2.0, is_higher_better=False) == pytest.approx(2.2)
    assert MaxDrop.parse("10%").compute_limit(-2.0, is_higher_better=True) == pytest.approx(-2.2)


def test_the_fastest_within_the_drop_is_chosen() -> None:
    models = [measured(0.9, 10), measured(0.895, 6), measured(0.80, 1), measured(0.892, 5), measured(math.nan, 1)]
    one = MaxDrop.parse("1%")
    assert choose(models, "accuracy", True, one, "latency") == 3
    assert choose(models, "accuracy", True, MaxDrop.parse("0"), "latency") == 0
    assert choose(models, "loss", False, MaxDrop.parse("0.005"), "batch") == 1
    assert choose(models, "accuracy", True, one, "size") == 0  # none is smaller
    equal = [measured(0.9, 9, flops=9.0), measured(0.9, 5, flops=3.0), measured(0.9, 2, flops=3.0)]
    assert choose(equal, "accuracy", True, one, "flops") == 2


def test_a_gain_within_the_noise_is_none() -> None:
    assert choose([measured(0.9, 1.0), measured(0.9, 0.97)], "accuracy", True, MaxDrop.parse("1%"), "latency") == 0
    unknown = [measured(0.9, 1, flops=5.0), measured(0.9, 1, flops=None)]
    assert choose(unknown, "accuracy", True, MaxDrop.parse("1%"), "flops") == 0


def test_the_front_has_what_no_other_beats() -> None:
    models = [measured(0.9, 10), measured(0.8, 1), measured(0.85, 12), measured(0.85, 5), measured(math.nan, 0.1)]
    assert find_front(models, "accuracy", True, "latency") == [1, 3, 0]
    assert find_front(models, "loss", False, "latency") == [1, 3, 0]


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
    assert found is not None
    assert found.factory.kwargs == {"num_classes": 7, "narrow": 2}
    decoder = ModelFactory(factory="shoal.models.decoder:Decoder", kwargs={"width": 128})
    found = choose_default_student(decoder, None)
    assert found is not None
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
