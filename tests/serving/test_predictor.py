"""The predictor's promises: one version per answer, a flip nothing sees half of, bad weights that change nothing."""

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.registry.manifest import ModelFactory, Signature, TensorSignature
from shoal.serve.call import Arrays
from shoal.serve.follower import WeightFollower
from shoal.serve.options import ModelOptions
from shoal.serve.predictor import LoadedModel, Predictor
from shoal.serve.versions import Versions
from shoal.weights import WeightSnapshot, WeightStore

DEADLINE_S = 5.0


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


class Shrinking(Affine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:1]


ROW = [-1, 2]


def signature(**outputs: list[int]) -> Signature:
    return Signature(
        inputs=[TensorSignature(name="x", datatype="FP32", shape=ROW)],
        outputs=[TensorSignature(name=name, datatype="FP32", shape=shape) for name, shape in outputs.items()],
    )


def predictor(module: type[nn.Module] = Affine, **outputs: list[int]) -> Predictor:
    factory = ModelFactory(factory=f"{__name__}:{module.__name__}")
    return Predictor(factory, signature(**(outputs or {"y": ROW})), ModelOptions())


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


def test_a_version_answers_with_its_own_weights_whatever_is_loaded_after_it() -> None:
    subject = predictor()
    first = subject.load(weights(1))
    others = [subject.load(weights(version)) for version in (2, 3)]
    assert [model.version for model in (first, *others)] == [1, 2, 3]
    assert [ask(model)["y"] for model in (first, *others)] == [[[4.0, 4.0]], [[8.0, 8.0]], [[12.0, 12.0]]]


def test_a_batch_is_answered_like_its_requests_one_by_one() -> None:
    subject = predictor().load(weights(3))
    generator = np.random.default_rng(0)
    requests = [{"x": generator.random((rows, 2), np.float32)} for rows in (1, 3, 2)]
    together = subject.predict_batch(requests)
    for request, answer in zip(requests, together, strict=True):
        # float32 matmul may sum in another order for another batch size
        np.testing.assert_allclose(answer["y"], subject.predict_batch([request])[0]["y"], rtol=1e-6)


def test_predict_is_preferred_and_only_the_signature_leaves() -> None:
    subject = predictor(TwoHeads, y=ROW, sum=[-1]).load(weights(1))
    assert ask(subject) == {"y": [[4.0, 4.0]], "sum": [2.0]}


def test_a_tuple_is_named_by_the_signature() -> None:
    subject = predictor(Pair, plus=ROW, total=[-1]).load(weights(1))
    assert ask(subject) == {"plus": [[2.0, 2.0]], "total": [2.0]}


def test_a_missing_output_or_row_is_an_error_of_the_model() -> None:
    with pytest.raises(InferenceError, match="no output 'more'"):
        ask(predictor(Affine, y=ROW, more=ROW).load(weights(1)))
    with pytest.raises(InferenceError, match=r"'y': expected \[2, 2\], the model gave \[1, 2\]"):
        predictor(Shrinking).load(weights(1)).predict_batch([ONES, ONES])


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


def versions(*served: int) -> Versions:
    subject = Versions(predictor())
    for version in served:
        subject.stage(weights(version))
        assert subject.flip() == version
    return subject


def test_before_any_weights_a_model_is_unavailable() -> None:
    with pytest.raises(InferenceError, match="no weights") as caught:
        versions().predict_batch([ONES])
    assert (caught.value.status, versions().version) == (503, 0)


def test_staged_weights_answer_only_after_the_flip() -> None:
    subject = versions(1)
    subject.stage(weights(2))
    with pytest.raises(WeightsError):
        subject.stage(damaged(weights(3)))
    assert subject.predict_batch([ONES])[0].version == 1
    assert [subject.flip(), subject.flip()] == [2, 2]  # the second time nothing is staged: nothing changes
    assert subject.predict_batch([ONES])[0].version == 2


def test_no_answer_is_a_mixture_of_versions() -> None:
    """While versions are flipped as fast as they load, every answer is exactly what its version alone would give."""
    subject = versions(1)
    done = threading.Event()
    mixtures: list[str] = []
    seen: list[set[int]] = [set(), set()]

    def predict_all_along(seen: set[int]) -> None:
        while not done.is_set():
            for answer in subject.predict_batch([ONES] * 4):
                seen.add(answer.version)
                if answer.outputs["y"].tolist() != [[4.0 * answer.version] * 2]:
                    mixtures.append(f"{answer.version}: {answer.outputs['y']}")

    threads = [threading.Thread(target=predict_all_along, args=[each]) for each in seen]
    for thread in threads:
        thread.start()
    deadline, version = time.monotonic() + DEADLINE_S, 1
    while min(map(len, seen)) < 15 and time.monotonic() < deadline:
        version += 1
        subject.stage(weights(version))
        subject.flip()
    done.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert mixtures == []
    assert min(map(len, seen)) >= 15


def test_a_factory_that_gives_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a torch"):
        Predictor(ModelFactory(factory="builtins:dict"), signature(y=ROW), ModelOptions())


def wait_for_version(subject: Versions, version: int) -> None:
    wait_until(lambda: subject.version == version)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_follower_serves_what_is_published_and_skips_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    store, subject = WeightStore(), versions()
    follower = WeightFollower(store, subject, poll_s=0.05)
    store.publish(weights(1))
    wait_for_version(subject, 1)
    store.publish(damaged(weights(2)))
    wait_until(lambda: follower.rejected == 2)
    assert (follower.rejected, subject.version, follower.alive) == (2, 1, True)
    assert "version 1 goes on serving" in caplog.text
    store.publish(weights(3))
    wait_for_version(subject, 3)
    follower.close()
    follower.close()
    assert not follower.alive


class Scripted:
    """A source that says what it is told to, and counts its questions. Versions may go back, as an alias does."""

    def __init__(self) -> None:
        self.now: WeightSnapshot | Exception | None = None
        self.asked = 0

    def latest(self) -> WeightSnapshot | None:
        return self.wait_newer(0, 0.0)

    def wait_newer(self, than: int, timeout_s: float) -> WeightSnapshot | None:
        self.asked += 1
        if isinstance(self.now, Exception):
            raise self.now
        if self.now is None or self.now.version == than:
            time.sleep(timeout_s)
            return None
        return self.now


def test_the_follower_goes_back_with_an_alias_after_a_bad_version_and_then_rests() -> None:
    source, subject = Scripted(), versions()
    follower = WeightFollower(source, subject, poll_s=0.02)
    source.now = weights(3)
    wait_for_version(subject, 3)
    source.now = damaged(weights(4))
    wait_until(lambda: follower.rejected == 4)
    source.now = weights(2)
    wait_for_version(subject, 2)
    asked = source.asked
    wait_until(lambda: source.asked >= asked + 3)  # each of these waited for poll_s: no busy loop
    assert subject.version == 2
    source.now = WeightsError("the file is damaged")
    asked = source.asked
    wait_until(lambda: source.asked >= asked + 3)
    assert follower.alive
    source.now = weights(5)
    wait_for_version(subject, 5)
    follower.close()
