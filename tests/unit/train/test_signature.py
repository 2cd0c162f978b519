"""What a network takes and gives, found by running it once."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.registry import Signature, TensorSignature
from shoal.train import Task
from shoal.train.export.signature import infer_signature


class Two(nn.Module):
    """Two inputs by name, three outputs as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        hidden = self.drop(tokens.float() * mask)
        made = {"scores": hidden, "best": hidden.argmax(-1), "half": hidden.to(torch.bfloat16)}
        return {"dict": made, "tuple": tuple(made.values()), "text": "scores", "pair": (hidden, "scores")}[self.kind]


class Given(Task):
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return batch["tokens"], batch["mask"]


BATCH = {"tokens": torch.arange(12).reshape(2, 6), "mask": torch.ones(2, 6, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("kind", "names"), [("dict", ["scores", "best", "half"]), ("tuple", ["output_0", "output_1", "output_2"])]
)
def test_names_types_and_shapes(kind: str, names: list[str]) -> None:
    model = Two(kind)
    found = infer_signature(Given(), model, BATCH)
    inputs = [(each.name, each.datatype, each.shape) for each in found.inputs]
    assert inputs == [("tokens", "INT64", [-1, 6]), ("mask", "BOOL", [-1, 6])]
    outputs = [(each.datatype, each.shape) for each in found.outputs]
    assert outputs == [("FP32", [-1, 6]), ("INT64", [-1]), ("BF16", [-1, 6])]
    assert [each.name for each in found.outputs] == names
    assert model.training  # it is left as it was found


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (lambda given: {"best": given["output"].max()}, "gave 'best' as a float32"),
        (lambda given: {"best": given["output"].max(0)}, r"gave 'best' with the shape \[3\] for 2 samples"),
        (lambda given: {"phase": given["output"].astype(complex)}, "gave 'phase' as a complex128"),
        (lambda given: {"output": given["output"].tolist()}, "gave 'output' as a list"),
        (lambda given: {}, "gave nothing"),
        (lambda given: given["output"], "gave a ndarray"),
        (lambda given: given["outputs"], "raised KeyError: 'outputs'"),
    ],
)
def test_what_postprocess_may_not_make_of_the_outputs(answers: Any, problem: str) -> None:
    """An endpoint would say so of every request, when the network has long been trained."""
    task = Task()
    task.postprocess = answers
    with pytest.raises(ConfigError, match=rf"Task\.postprocess {problem}"):
        infer_signature(task, nn.Linear(4, 3), (torch.ones(2, 4), torch.zeros(2)))


def test_what_postprocess_makes_of_the_outputs_is_announced() -> None:
    task, inputs = Task(), torch.ones(2, 4)
    task.postprocess = lambda given: {
        "output": np.negative(given["output"], out=given["output"]),
        "label": given["output"].argmax(-1),
        "name": np.array(["shoe", "hat"])[given["output"].argmax(-1) % 2],
        "twice": np.float64([[1, 2]] * 2),
    }
    for network in (nn.Identity(), nn.Identity().to(torch.bfloat16)):
        found = infer_signature(task, network, (inputs.to(torch.bfloat16), torch.zeros(2)))
        assert [(each.name, each.datatype, each.shape) for each in found.outputs] == [
            ("output", "FP32", [-1, 4]),
            *(("label", "INT64", [-1]), ("name", "BYTES", [-1]), ("twice", "FP64", [-1, 2])),
        ]
    infer_signature(task, nn.Identity(), (inputs, torch.zeros(2)))
    assert inputs.tolist() == [[1.0] * 4] * 2  # the hook writes to what is its own


def test_more_inputs_than_names_are_numbered() -> None:
    class Whatever(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return given[0]

    found = infer_signature(Given(), Whatever(), BATCH)
    assert [each.name for each in found.inputs] == ["given", "input_1"]


@pytest.mark.parametrize(("kind", "name"), [("text", "output"), ("pair", "output_1")])
def test_what_is_no_tensor_cannot_be_served(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' of its network is a str"):
        infer_signature(Given(), Two(kind), BATCH)


def test_a_dtype_that_the_protocol_has_no_word_for_is_refused() -> None:
    class Complex(nn.Module):
        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            return tokens.to(torch.complex64)

    with pytest.raises(ConfigError, match="complex64"):
        infer_signature(Given(), Complex(), BATCH)


class Announced(Task):
    """An endpoint takes another form than training does."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def signature(self) -> Any:
        return self.answer


def test_a_task_may_say_what_an_endpoint_takes_and_gives_and_nothing_is_run() -> None:
    tensor = TensorSignature(name="x", datatype="INT64", shape=[-1, -1])
    said = Signature(inputs=[tensor], outputs=[tensor])
    assert infer_signature(Announced(said), nn.Identity(), object()) is said


def test_a_signature_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Announced\.signature gave a dict.*Signature"):
        infer_signature(Announced({}), nn.Identity(), torch.ones(2, 4))


def test_without_one_the_network_is_run() -> None:
    found = infer_signature(Announced(None), nn.Linear(4, 3), (torch.ones(2, 4), torch.zeros(2)))
    assert [each.shape for each in found.outputs] == [[-1, 3]]


def test_a_network_that_takes_no_tensors_is_told_of_the_method_that_describes_its_requests() -> None:
    class Trees(Task):
        def inputs(self, batch: Any) -> tuple[Any, ...]:
            return ({"token": batch},)

    class Network(nn.Module):
        def forward(self, trees: dict[str, torch.Tensor]) -> torch.Tensor:
            return trees["token"]

    with pytest.raises(ConfigError, match=r"'trees' of its network is a dict.*Task's `signature`"):
        infer_signature(Trees(), Network(), torch.ones(2, 4))
