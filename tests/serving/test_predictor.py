"""The predictor's promises: one version per answer, a flip nothing sees half of, bad weights that change nothing."""

import dataclasses
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Identity

from refusals import refused
from registered import arrays_of, tensors
from shoal.errors import ConfigError, WeightsError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.messages.infer_call import Arrays
from shoal.serve.model.formats.torch_forward import COPIED_BYTES
from shoal.serve.model.predictor import LoadedModel, Predictor
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot


class Affine(nn.Module):
    """y = x @ weight + bias, with a buffer that is saved and one that is not."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("offset", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias + self.offset) * self.scale


class TwoHeads(Affine):
    """Has a `predict` of its own, which is preferred; `forward` would be wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("predict should have been called")

    def predict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x.sum(dim=1), "y": super().forward(x), "not in the signature": x}


class Pair(Affine):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x + 1, x.sum(dim=1)


ROW = [-1, 2]


def signature(**outputs: list[int]) -> Signature:
    return Signature(
        inputs=tensors(x=ROW),
        outputs=tensors(**outputs),
    )


def predictor(
    module: type[nn.Module] = Affine, outputs: dict[str, list[int]] | None = None, **options: object
) -> Predictor:
    factory = ModelFactory(factory=f"{__name__}:{module.__name__}")
    words = {"max_batch_size": 8, **options}
    return Predictor(factory, signature(**(outputs or {"y": ROW})), ModelOptions.parse(words))


def constant_tensors(value: float, size: int = 2) -> dict[str, np.ndarray]:
    """Every element of every tensor is `value`: an input of ones gives 4 * value in every output."""
    return {
        "weight": np.full((size, size), value, np.float32),
        "bias": np.full(size, value, np.float32),
        "offset": np.full(size, value, np.float32),
    }


def weights(version: int, value: float | None = None) -> WeightSnapshot:
    return WeightSnapshot.of(version, constant_tensors(version if value is None else value))


ONES = {"x": np.ones((1, 2), np.float32)}


def ask(model: LoadedModel, inputs: Arrays = ONES) -> dict[str, list[object]]:
    return {name: array.tolist() for name, array in model.predict_batch([inputs])[0].items()}


def test_a_batch_is_answered_like_its_requests_one_by_one() -> None:
    subject = predictor().load(weights(3))
    generator = np.random.default_rng(0)
    requests = [{"x": generator.random((rows, 2), np.float32)} for rows in (1, 3, 2)]
    together = subject.predict_batch(requests)
    for request, answer in zip(requests, together, strict=True):
        # float32 matmul may sum in another order for another batch size
        np.testing.assert_allclose(answer["y"], subject.predict_batch([request])[0]["y"], rtol=1e-6)


def test_predict_is_preferred_and_only_the_signature_leaves() -> None:
    subject = predictor(TwoHeads, {"y": ROW, "sum": [-1]}).load(weights(1))
    assert ask(subject) == {"y": [[4.0, 4.0]], "sum": [2.0]}


def test_a_tuple_is_named_by_the_signature() -> None:
    subject = predictor(Pair, {"plus": ROW, "total": [-1]}).load(weights(1))
    assert ask(subject) == {"plus": [[2.0, 2.0]], "total": [2.0]}


class Wrong(nn.Module):
    """Does what the first value of a batch says."""

    def forward(self, x: torch.Tensor) -> object:
        match int(x[0, 0]):
            case 1:
                return {"z": x}
            case 2:
                return x[:1]
            case 3:
                return x.sum(1)
            case 4:
                return x.double()
            case 5:
                return torch.cat([x, x], dim=1)
            case 6:
                return x / torch.tensor([0.0, 1.0])
            case 7:
                raise RuntimeError("this row")
        return x


def rows(*first: int) -> dict[str, np.ndarray]:
    return {"x": np.array([[value, value] for value in first], np.float32)}


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (1, "output 'y' is missing: the model gave 'z'"),
        (2, "output 'y': expected FP32 [2, 2], got FP32 [1, 2]"),
        (3, "output 'y': expected FP32 [2, 2], got FP32 [2]"),
        (4, "output 'y': expected FP32 [2, 2], got FP64 [2, 2]"),
        (5, "output 'y': expected FP32 [2, 2], got FP32 [2, 4]"),
        (6, "output 'y' is not finite: 2 of its 4 values are NaN or infinite"),
    ],
)
def test_an_output_that_does_not_fit_is_an_error_of_the_model_that_names_it(fault: int, complaint: str) -> None:
    model = predictor(Wrong).load(WeightSnapshot.of(1, {}))
    with refused(500, re.escape(complaint)):
        model.predict_batch([rows(fault), rows(0)])
    assert model.predict_batch([rows(0)])[0]["y"].tolist() == [[0.0, 0.0]]


def test_values_that_are_not_finite_pass_where_they_are_wanted() -> None:
    model = predictor(Wrong, finite=False).load(WeightSnapshot.of(1, {}))
    assert model.predict_batch([rows(6)])[0]["y"].tolist() == [[np.inf, 6.0]]


def test_what_a_model_raises_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="this row"):
        predictor(Wrong).load(WeightSnapshot.of(1, {})).predict_batch([rows(7), rows(0)])


class MeanOfTokens(nn.Module):
    """The mean of tokens that are no padding: of padding alone it is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, padding_idx=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        counts = (tokens != 0).sum(dim=1, keepdim=True)
        mean: torch.Tensor = self.table(tokens).sum(dim=1) / counts
        return mean


def test_the_example_of_a_text_is_not_all_padding() -> None:
    spec = Signature(inputs=tensors(tokens=("INT64", [-1, 5])), outputs=tensors(y=ROW))
    factory = ModelFactory(factory=f"{__name__}:MeanOfTokens")
    served = Predictor(factory, spec, ModelOptions())
    weights = arrays_of(MeanOfTokens())
    assert served.load(WeightSnapshot.of(1, weights)).version == 1


def test_a_version_that_cannot_answer_an_example_is_refused_unless_told_otherwise() -> None:
    def huge(tensors: dict[str, np.ndarray]) -> None:
        tensors["bias"][:] = tensors["offset"][:] = 3e38

    with pytest.raises(WeightsError, match="version 9 cannot answer an example: output 'y' is not finite"):
        predictor().load(changed(huge))
    with pytest.raises(WeightsError, match=r"expected FP32 \[1, 2\], got FP32 \[1\]\. `warm_up: false` serves it"):
        predictor(Pair, {"y": ROW, "total": ROW}).load(weights(1))
    assert predictor(warm_up=False).load(changed(huge)).version == 9


class Masked(Affine):
    """Some of its state is infinite from the start, as a mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.mask.exp()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_taken_though_no_example_shows_it(bad: float) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["weight"][1, 0] = bad

    complaint = r"version 9: 'weight' is not finite: 1 of its 4 values are NaN or infinite. `finite: false` serves it"
    with pytest.raises(WeightsError, match=complaint):
        predictor(warm_up=False).load(changed(spoil))
    assert predictor(warm_up=False, finite=False).load(changed(spoil)).version == 9


def test_a_mask_may_hold_infinities() -> None:
    tensors = constant_tensors(1) | {"mask": np.array([0.0, -np.inf], np.float32)}
    assert ask(predictor(Masked).load(WeightSnapshot.of(1, tensors))) == {"y": [[5.0, 4.0]]}


class Counting(Affine):
    """Remembers the sizes of its batches."""

    sizes: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return super().forward(x)


def test_the_first_version_is_warmed_up_at_every_size_and_the_next_ones_prove_themselves() -> None:
    subject = predictor(Counting, max_batch_size=6)
    Counting.sizes.clear()
    subject.load(weights(1))
    assert Counting.sizes == [1, 2, 4, 6, *(1, 1, 2, 2, 4, 4, 6, 6)]  # cold, and then measured
    Counting.sizes.clear()
    subject.load(weights(2))
    assert Counting.sizes == [1]


class NeedsRows(TwoHeads):
    def predict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        assert len(x)
        return super().predict(x)


def test_no_rows_are_answered_without_the_model() -> None:
    model = predictor(NeedsRows, {"y": ROW, "sum": [-1]}).load(weights(1))
    none = {"x": np.empty((0, 2), np.float32)}
    (empty,) = model.predict_batch([none])
    assert [(array.shape, array.dtype) for array in empty.values()] == [((0, 2), np.float32), ((0,), np.float32)]
    answers = model.predict_batch([none, ONES, none])
    assert [answer["y"].tolist() for answer in answers] == [[], [[4.0, 4.0]], []]
    assert model.predict_batch([none, none])[1]["sum"].shape == (0,)


class OneBuffer(nn.Module):
    """Writes every batch into the same memory, and gives views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(1024, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[: len(x)] = x
        return self.kept[: len(x)]


class KeptOutput(OneBuffer):
    """Gives the very tensor that it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 1, out=self.kept.resize_(x.shape))


@pytest.mark.parametrize("num_rows", [2, COPIED_BYTES // 4])
@pytest.mark.parametrize("module", [OneBuffer, KeptOutput, Identity])
def test_an_answer_is_never_overwritten_by_a_later_batch(module: type[nn.Module], num_rows: int) -> None:
    model, request = predictor(module).load(WeightSnapshot.of(1, {})), rows(*range(num_rows))
    first = model.predict(request)["y"]
    request["x"] += 1
    model.predict(request)
    np.testing.assert_array_equal(first, request["x"] - 1)


def test_a_large_output_that_the_model_forgets_is_not_copied() -> None:
    assert not predictor().load(weights(1)).predict(rows(*range(COPIED_BYTES)))["y"].flags.owndata


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def test_a_model_that_writes_to_its_inputs_leaves_the_callers_alone() -> None:
    """It is noticed in the warm-up. A shadow asks another version with the same arrays."""
    model = predictor(InPlace).load(WeightSnapshot.of(1, {}))
    body = rows(3)["x"].tobytes()
    for request in (rows(3), {"x": np.frombuffer(body, np.float32).reshape(1, 2)}):
        assert [model.predict_batch([request])[0]["y"].tolist() for _ in range(2)] == [[[4.0, 4.0]]] * 2


def test_versions_that_are_loaded_while_others_answer_never_mix() -> None:
    """Every answer is exactly what its version alone would give, however fast versions follow each other."""
    subject = predictor()
    newest = [subject.load(weights(1))]
    mixtures: list[object] = []

    def predict_all_along() -> set[int]:
        seen = set()
        while len(newest) < 40:
            model = newest[-1]
            seen.add(model.version)
            mixtures.extend(
                answer
                for answer in model.predict_batch([ONES] * 4)
                if answer["y"].tolist() != [[4.0 * model.version] * 2]
            )
        return seen

    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(predict_all_along) for _ in range(2)]
        while len(newest) < 40:
            newest.append(subject.load(weights(len(newest) + 1)))
        assert all(each.result(5.0) for each in asked)
    assert mixtures == []


def test_inputs_go_in_the_signatures_order_whatever_the_requests() -> None:
    spec = Signature(
        inputs=tensors(left=[-1], right=[-1]),
        outputs=tensors(y=[-1]),
    )
    model = Predictor(ModelFactory(factory=f"{__name__}:Minus"), spec, ModelOptions()).load(WeightSnapshot.of(1, {}))
    request = {"right": np.ones(1, np.float32), "left": np.full(1, 3, np.float32)}
    assert [answer["y"].tolist() for answer in model.predict_batch([request, request])] == [[2.0], [2.0]]
    assert model.predict_batch([request])[0]["y"].tolist() == [2.0]


class Minus(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


def damaged(snapshot: WeightSnapshot) -> WeightSnapshot:
    payload = bytearray(snapshot.payload)
    payload[-1] ^= 1
    return dataclasses.replace(snapshot, payload=bytes(payload))


def changed(change: Callable[[dict[str, np.ndarray]], None]) -> WeightSnapshot:
    tensors = constant_tensors(9)
    change(tensors)
    return WeightSnapshot.of(9, tensors)


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        (damaged(weights(9)), "checksum"),
        (WeightSnapshot.from_payload(9, b"nonsense"), "not safetensors"),
        (changed(lambda tensors: tensors.__delitem__("bias")), "'bias' is missing"),
        (changed(lambda tensors: tensors.update(extra=np.zeros(1))), "no 'extra'"),
        (changed(lambda tensors: tensors.update(bias=np.zeros(3, np.float32))), r"\[3\], the model has .*\[2\]"),
        (changed(lambda tensors: tensors.update(bias=np.zeros(2, np.float64))), "float64"),
    ],
    ids=["checksum", "format", "missing", "extra", "shape", "dtype"],
)
def test_weights_that_do_not_fit_are_refused(snapshot: WeightSnapshot, complaint: str) -> None:
    subject = predictor()
    with pytest.raises(WeightsError, match=complaint):
        subject.load(snapshot)
    assert ask(subject.load(weights(1))) == {"y": [[4.0, 4.0]]}


def test_a_factory_that_gives_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a torch"):
        Predictor(ModelFactory(factory="builtins:dict"), signature(y=ROW), ModelOptions())
