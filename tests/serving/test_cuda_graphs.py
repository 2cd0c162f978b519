"""The slots of CUDA graphs without a device: an eager call into fixed memory stands in for a graph's replay."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from registered import tensors
from shoal.errors import ConfigError
from shoal.registry import ModelFactory, Signature
from shoal.serve.model import predictor
from shoal.serve.model.formats import cuda_graphs
from shoal.serve.model.formats.cuda_graphs import GraphedModule
from shoal.serve.model.formats.template import Arrays
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def predict(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self(x)}


def state(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((2,), value)}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were captured."""
    sizes: list[int] = []

    def eager(compute: Callable[[], Tensor | dict[str, Tensor]], _: object) -> tuple[Callable[[], None], object]:
        outputs = compute()
        tensor = outputs if isinstance(outputs, Tensor) else outputs["y"]

        def replay() -> None:
            again = compute()
            tensor.copy_(again if isinstance(again, Tensor) else again["y"])

        sizes.append(len(tensor))
        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "capture_graph", eager)
    return sizes


def test_a_batch_takes_the_graph_of_the_next_power_of_two_and_gets_its_own_rows(captures: list[int]) -> None:
    version = GraphedModule(Times(), lambda module: module).bind(state(3))
    answers = [version(torch.full((rows, 2), float(rows))) for rows in (1, 3, 4, 2, 3)]
    assert [answer.tolist() for answer in answers] == [[[3.0 * rows] * 2] * rows for rows in (1, 3, 4, 2, 3)]
    assert captures == [1, 4, 2]


def test_a_slot_is_written_again_only_when_nothing_refers_to_its_version(captures: list[int]) -> None:
    graphed = GraphedModule(Times(), lambda module: module.predict)
    ones = torch.ones(1, 2)
    first = graphed.bind(state(1))
    assert first(x=ones)["y"].tolist() == [[1.0, 1.0]]
    second = graphed.bind(state(2))
    assert [each(x=ones)["y"].tolist() for each in (second, first)] == [[[2.0, 2.0]], [[1.0, 1.0]]]
    del first
    third = graphed.bind(state(3))
    assert [each(x=ones)["y"].tolist() for each in (second, third)] == [[[2.0, 2.0]], [[3.0, 3.0]]]
    assert captures == [1, 1]  # the third version replays the first one's graph


class WithExtras(Times):
    """What is no row comes out as it is: it is not in the signature, but a hook may read it."""

    def predict(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
        return {"y": self(x), "total": self.weight.sum(), "name": "times"}


def test_outputs_without_rows_are_copied_in_full(captures: list[int]) -> None:
    found = GraphedModule(WithExtras(), lambda module: module.predict).bind(state(3))(x=torch.ones(3, 2))
    assert (found["y"].tolist(), float(found["total"]), found["name"]) == ([[3.0, 3.0]] * 3, 6.0, "times")
    assert captures == [4]


def make_predictor(monkeypatch: pytest.MonkeyPatch, **options: object) -> predictor.Predictor:
    monkeypatch.setattr(predictor, "devices", lambda *_: ["cpu"])
    specs = tensors(x=[-1, 2], y=[-1, 2])
    parsed = ModelOptions.parse({"cuda_graphs": True, "max_batch_size": 6, **options})
    factory = ModelFactory(factory=f"{__name__}:Times")
    return predictor.Predictor(factory, Signature(inputs=specs[:1], outputs=specs[1:]), parsed)


@pytest.mark.parametrize("compiles", [False, True])
def test_every_version_has_its_graphs_before_it_serves(
    compiles: bool, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they capture is the compiled forward, if it is."""
    num_calls = []

    def compile_eagerly(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments: (num_calls.append(1), function(*arguments))[1]

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    subject = make_predictor(monkeypatch, compile=compiles)
    versions = [subject.load(WeightSnapshot.of(each, {"weight": np.full(2, each, np.float32)})) for each in (1, 2)]
    assert captures == [1, 2, 4, 8] * 2
    assert (len(num_calls) >= len(captures)) == compiles
    for rows in range(1, 7):
        for model in versions:
            (answer,) = model.predict_batch([{"x": np.ones((rows, 2), np.float32)}])
            assert answer["y"].tolist() == [[model.version] * 2] * rows
    del model, versions[0]
    subject.load(WeightSnapshot.of(3, {"weight": np.full(2, 3, np.float32)}))  # in the slot of the first
    assert captures == [1, 2, 4, 8] * 2


def test_one_capture_at_a_time_which_other_threads_do_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, seen = list[str](), list[tuple[int, object, str]]()

    @contextmanager
    def graph(_: object, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        under_way.append("capture")
        seen.append((len(under_way), pool, capture_error_mode))
        yield
        under_way.pop()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    barrier = threading.Barrier(2)

    def capture(pool: str) -> None:
        barrier.wait()
        for _ in range(200):
            cuda_graphs.capture_graph(lambda: None, pool)

    threads = [threading.Thread(target=capture, args=(pool,)) for pool in "ab"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(seen) == {(1, "a", "thread_local"), (1, "b", "thread_local")}


def test_a_model_that_cannot_be_captured_is_rejected_by_the_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its examples are a guess, as with a hook: it would fail on every request."""

    @contextmanager
    def graph(_: object, **__: object) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nadvice")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    for hook in ({}, {"preprocess": f"{__name__}:pass_on"}):
        with pytest.raises(ConfigError, match="cuda_graphs = True: the model cannot be captured: operation not perm"):
            make_predictor(monkeypatch, **hook).load(WeightSnapshot.of(1, {"weight": np.ones(2, np.float32)}))


def pass_on(arrays: Arrays) -> Arrays:
    return arrays
