"""The sizes that an exported program or an ONNX file excludes are refused before a forward, by name and range."""

import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from serving.replica_set import Asked, ask, serving_one
from shoal.errors import InferenceError
from shoal.libs.export.formats import exported
from shoal.registry import ModelFactory, Registry
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.version_router import BatchGroup
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot

BATCH = Dim("batch")


class Positions(nn.Module):
    """x [B, N] times N of 64 weights: a program of more than 64 has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * self.weight[: x.shape[1]]).sum(1)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, twice: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(1) + twice.sum(1)


class Counted(nn.Module):
    """The number of rows of the batch, in every row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * 0 + x.shape[0]


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def payload(module: nn.Module, shapes: Mapping[str, Any], *sizes: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    example = tuple(torch.ones(size) for size in sizes)
    torch.export.save(torch.export.export(module.eval(), example, dynamic_shapes=shapes), file)
    return file.getvalue()


def load(content: bytes, **options: Any) -> LoadedModel:
    signature = exported.read_signature(content, "model.pt2")
    predictor = Predictor(ModelFactory(format="torch_export"), signature, ModelOptions.parse(options))
    return predictor.load(WeightSnapshot.from_payload(1, content))


async def infer(replica: EndpointReplica, *shape: int) -> Asked:
    tensor = {"name": "x", "shape": list(shape), "datatype": "FP32", "data": [1.0] * int(np.prod(shape))}
    return await ask(replica, "POST", "/v2/models/m/infer", {"inputs": [tensor]})


def register(content: bytes) -> None:
    snapshot, signature = WeightSnapshot.from_payload(1, content), exported.read_signature(content, "file")
    Registry().register("m", snapshot, model=ModelFactory(format="torch_export"), signature=signature)


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"batch_dim": {"x": 1, "output": 1}}])
def test_sizes_are_those_of_the_models_own_dimensions(options: dict[str, Any]) -> None:
    """Without a batch, or with it in dimension 1: dimension 0 of the program has a range of its own."""
    content = payload(Doubled(), {"x": {0: Dim("n", min=2, max=64), 1: BATCH}}, (3, 4))
    loaded = load(content, **options)
    given = np.ones((1, 65, 4) if "max_batch_size" in options else (4, 65), np.float32)
    with pytest.raises(InferenceError, match="2 to 64 in dimension 0, got 65"):
        loaded.size_limits.check({"x": given})
    fitting = given[:, :64]
    loaded.size_limits.check({"x": fitting})
    assert loaded.predict_batch([{"x": fitting}])[0]["output"].shape[:2] == fitting.shape[:2]


async def test_a_size_that_a_program_excludes_is_refused() -> None:
    register(payload(Positions(), {"x": {0: BATCH, 1: Dim("n", min=2, max=64)}}, (3, 4)))

    async with serving_one("m") as (_, replica):
        assert (await infer(replica, 1, 64)).status == 200
        answer = await infer(replica, 2, 65)
        words = "input 'x': this version takes 2 to 64 in dimension 1, got 65"
        assert (answer.status, answer.body["error"]) == (422, words)
        counts = replica.manager.get_model("m").counts.snapshot()
        assert counts.refused == {422: 1}  # held against no version
        assert counts.versions[1].statuses == {200: 1}


async def test_a_request_that_waited_for_a_version_of_other_sizes_is_refused() -> None:
    """It was checked against the version that answered when it came."""
    register(payload(Doubled(), {"x": {0: BATCH, 1: Dim("n", min=2, max=64)}}, (3, 4)))

    async with serving_one("m") as (_, replica):
        model = replica.manager.get_model("m")
        group = BatchGroup(model.router.choose_track(None, "", ""), None)

        def batch(*sizes: int) -> Any:
            calls = [InferCall({"x": np.ones((1, size), np.float32)}, 1) for size in sizes]
            return SimpleNamespace(requests=[SimpleNamespace(group=group, request=call) for call in calls])

        with pytest.raises(InferenceError, match="2 to 64 in dimension 1, got 65"):
            model._forward(batch(64, 65))
        answered = batch(64)
        model._forward(answered)
        assert answered.version == 1


def test_sizes_that_depend_on_each_other_are_refused_where_they_disagree() -> None:
    size = Dim("n", min=3, max=50)
    shapes = {"x": {0: BATCH, 1: size}, "mask": {0: BATCH, 1: size}, "twice": {0: BATCH, 1: 2 * size}}
    limits = load(payload(Masked(), shapes, (3, 4), (3, 4), (3, 8))).size_limits

    def check(x: int, mask: int, twice: int) -> None:
        limits.check({"x": np.ones((1, x)), "mask": np.ones((1, mask)), "twice": np.ones((1, twice))})

    check(3, 3, 6)
    check(50, 50, 100)
    with pytest.raises(InferenceError, match="'x': this version takes 3 to 50 in dimension 1, got 2"):
        check(2, 2, 4)
    with pytest.raises(InferenceError, match="'mask': expected 5 in dimension 1, as given by 5 in dimension 1 of 'x'"):
        check(5, 6, 10)
    with pytest.raises(
        InferenceError, match="'twice': this version takes 6 to 100 in steps of 2 in dimension 1, got 9"
    ):
        check(5, 5, 9)
    with pytest.raises(InferenceError, match="'twice': expected 10 in dimension 1, as given by 5"):
        check(5, 5, 12)


def test_a_batch_is_computed_with_as_many_rows_as_the_program_admits() -> None:
    model = load(payload(Counted(), {"x": {0: Dim("batch", min=4, max=8)}}, (5, 2)), max_batch_size=64)
    requests = [{"x": np.ones((rows, 2), np.float32)} for rows in (3, 1, 9)]
    outputs = [answer["output"].tolist() for answer in model.predict_batch(requests)]
    assert outputs == [[8.0] * 3, [8.0], [8.0] * 4 + [5.0] * 5]
    assert model.predict_batch(requests[1:2])[0]["output"].tolist() == [4.0]  # three copies fill it up


class Transposed(nn.Module):
    """x [2, B] as [B, 2], the number of rows of the batch in [2, B], and a tensor without a batch."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        size = x.shape[1]
        return {"rows": x.T.clone(), "size": x * 0 + size, "scale": torch.ones(3)}


def test_a_batch_in_another_dimension_has_as_many_rows_as_the_program_admits() -> None:
    content = payload(Transposed(), {"x": {1: Dim("batch", min=4, max=8)}}, (2, 5))
    model = load(content, batch_dim={"x": 1, "size": 1, "scale": None})
    requests = [{"x": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)} for rows in (3, 1, 9)]  # batch-first
    answers = model.predict_batch(requests)
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["rows"], request["x"])
        np.testing.assert_array_equal(answer["scale"], np.ones((len(request["x"]), 3)))
    assert [answer["size"][:, 0].tolist() for answer in answers] == [[8.0] * 3, [8.0], [8.0] * 4 + [5.0] * 5]
    assert model.predict_batch(requests[1:2])[0]["size"].tolist() == [[4.0, 4.0]]


def test_a_program_without_bounds_has_no_limits() -> None:
    model = load(payload(Counted(), {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, (3, 4)))
    model.size_limits.check({"x": np.ones((1, 1), np.float32)})
    assert model.predict_batch([{"x": np.ones((1, 1), np.float32)}])[0]["output"].tolist() == [1.0]
