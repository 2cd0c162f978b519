"""Workers that share a model: what a plan does not see, errors of its own, strangers, workers lost in a load."""

import gc
import socket
import sys
import threading
from typing import Any

import gang_models
import numpy as np
import pytest
import torch
from gang_models import ThreadLauncher, predictor_of, started
from safetensors.torch import save
from torch import Tensor, nn

from refusals import refused
from registered import tensors
from shoal.channel import connection
from shoal.channel.connection import ChannelAddress
from shoal.errors import ClusterError, InferenceError, ModelError, PlanError, WeightsError
from shoal.libs.gang.gang import Gang
from shoal.libs.gang.team import GangLost, Team
from shoal.registry import ModelFactory, ModelVersion, Registry, Signature
from shoal.serve.spec.model_options import ModelOptions
from shoal.weights import WeightSnapshot
from waiting import wait_for

Specs = dict[str, Any]
X: Specs = {"x": [-1, 4]}
Y: Specs = {"y": [-1, 4]}
TOKENS: Specs = {"x": ("INT64", [-1])}


def register(kind: type[nn.Module], inputs: Specs = X, outputs: Specs = Y) -> ModelVersion:
    torch.manual_seed(0)
    state = {name: each.clone() for name, each in kind().state_dict().items()}
    snapshot, factory = WeightSnapshot.from_payload(1, save(state)), ModelFactory(factory=f"{__name__}:{kind.__name__}")
    signature = Signature(inputs=tensors(**inputs), outputs=tensors(**outputs))
    return Registry().register(kind.__name__.lower(), snapshot, model=factory, signature=signature)


def request(*values: float) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([values], np.float32)}]


class Chain(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.other, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x).relu()).relu()) + 0 * self.other(x).mean()


class LateLayer(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu()).relu()
        return self.c(h) if bool(x[0, 0] >= 0) else self.other(h)


class EarlyLayer(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if bool(x[0, 0] >= 0) else self.other(x)
        return self.c(self.b(h.relu()).relu())


class Flagged(Chain):
    """Chooses by a value of the first stage, without a gradient, in the last."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        chosen = h.mean() < -1
        h = self.c(self.b(h).relu())
        return torch.where(chosen, h, -h)


class Tied(nn.Module):
    """Uses its embedding again, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.value = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.two(self.one(self.embedding(x)).relu()).relu()
        return nn.functional.linear(h, self.embedding.weight).argmax(-1), self.value(h)


@pytest.mark.parametrize(("kind", "answered"), [(LateLayer, [1]), (EarlyLayer, [1, -1])])
def test_a_branch_for_which_a_stage_has_no_weights_is_an_error(kind: type[Chain], answered: list[int]) -> None:
    version, options = register(kind), ModelOptions(max_batch_size=16, finite=False)
    expected = predictor_of(version, None, options).load(version.snapshot())
    with started(ThreadLauncher()) as gang:
        loaded = predictor_of(version, gang, options).load(version.weight_file())
        if -1 not in answered:
            with pytest.raises(ModelError, match="other"):
                loaded.predict_batch(request(-1, 2, 3, 4))
        for value in answered:
            one, other = (each.predict_batch(request(value, 2, 3, 4))[0]["y"] for each in (loaded, expected))
            np.testing.assert_allclose(one, other, rtol=1e-4)


class Whole(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Listed(Chain):
    """Uses a parameter of its own by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.shared[0])


class Picky(Chain):
    """Takes lengths that five divides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.reshape(len(x), -1, 5)[:, 0, :4])))


TIED: Specs = {"choice": ("INT64", [-1]), "value": [-1, 1]}
REJECTED: list[tuple[type[nn.Module], Specs, Specs, str]] = [
    (Tied, TOKENS, TIED, "embedding.weight"),
    (Flagged, X, Y, "used by a worker that does not have it"),
    (Whole, X, {"y": ("INT64", [-1])}, "gradients of floating-point outputs"),
    (Listed, X, Y, "has a parameter in a list or an object"),
    (Picky, {"x": [-1, -1]}, Y, r"example \(x \[2, 16\]\)"),
]


@pytest.mark.parametrize(("kind", "given", "promised", "reason"), REJECTED)
def test_what_cannot_be_planned_is_rejected_with_the_reason(
    kind: type[nn.Module], given: Specs, promised: Specs, reason: str
) -> None:
    gang = Gang(ThreadLauncher(), 2, "pipeline")
    with pytest.raises(PlanError, match=reason):
        predictor_of(register(kind, given, promised), gang)


class OneRow(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x.reshape(1, 4))))


class Halves(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))).float()


@pytest.mark.parametrize(
    ("kind", "given", "array"),
    [(OneRow, X, np.ones((1, 4), np.float32)), (Halves, {"x": ("BF16", [-1, 4])}, np.full((1, 4), 0x3F80, np.uint16))],
)
def test_the_example_is_as_requests_are(kind: type[nn.Module], given: Specs, array: np.ndarray) -> None:
    version, options = register(kind, given), ModelOptions(max_batch_size=1)
    expected = predictor_of(version, None, options).load(version.snapshot())
    with started(ThreadLauncher()) as gang:
        loaded = predictor_of(version, gang, options).load(version.weight_file())
        one, other = (each.predict_batch([{"x": array}])[0]["y"] for each in (loaded, expected))
        np.testing.assert_allclose(one, other, rtol=1e-2)


class OwnError(InferenceError):
    """Cannot be made of its arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(422, one + other)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


class Faulty(Chain):
    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 6:
            raise RuntimeError("the first stage")
        h = self.c(self.b(self.a(x)))
        if x[0, 0] == 7:
            raise FileNotFoundError("a table")
        if x[0, 0] == 8:
            sys.exit(3)
        if x[0, 0] == 9:
            raise OwnError("its", "own")
        if x[0, 0] == 10:
            raise InferenceError(422, "too long")
        return h


def test_no_error_of_a_model_ends_its_workers() -> None:
    version = register(Faulty)
    with started(ThreadLauncher()) as gang:
        loaded, team = predictor_of(version, gang).load(version.weight_file()), gang._team
        for value, reason in ((6, "the first stage"), (7, "a table"), (8, "SystemExit"), (9, "itsown")):
            with pytest.raises(ModelError, match=reason):
                loaded.predict_batch(request(value, 0, 0, 0))
        with refused(422, "too long"):
            loaded.predict_batch(request(10, 0, 0, 0))
        assert len(loaded.predict_batch(request(0, 0, 0, 0))) == 1
        assert gang._team is team


def test_a_worker_that_says_nothing_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROOF_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        class Silent(ThreadLauncher):
            def start(self, count: int) -> list[ChannelAddress]:
                return [ChannelAddress(*silent.getsockname(), b"")] * count

        with pytest.raises(ClusterError, match="cannot be reached"):
            Gang(Silent(), 2, "pipeline").start()


def test_a_version_is_dropped_while_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    version, launcher = gang_models.register("ConvNet"), ThreadLauncher()
    load = Team.load
    replacing = threading.Event()
    go_on = threading.Event()

    def wait(team: Team, message: Any) -> None:
        replacing.set()
        go_on.wait(60.0)
        load(team, message)

    with started(launcher) as gang:
        predictor = predictor_of(version, gang)
        one, two = predictor.load(version.weight_file()), predictor.load(version.weight_file())
        monkeypatch.setattr(Team, "load", wait)
        launcher.members[1].close()
        assert replacing.wait(60.0)
        require_team, asked = gang._require_team, threading.Event()
        monkeypatch.setattr(gang, "_require_team", lambda: asked.set() or require_team())
        del one
        gc.collect()
        asked.wait(0.5)  # which is where a drop would be lost
        go_on.set()
        wait_for(lambda: gang._team is not None)
        wait_for(lambda: [len(member._versions) for member in launcher.members] == [1, 1])
        assert two.version == 1


@pytest.mark.parametrize("moment", ["in the load", "in the warm-up"])
def test_a_lost_worker_rejects_no_version(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, launcher = gang_models.register("ConvNet"), ThreadLauncher()
    with started(launcher) as gang:
        predictor = predictor_of(version, gang)
        run = gang.run
        load = Team.load

        def lose(*call: Any) -> Any:
            monkeypatch.setattr(gang, "run", run)
            launcher.members[1].close()
            raise GangLost("killed")

        def lose_before(*call: Any) -> None:
            monkeypatch.setattr(Team, "load", load)
            launcher.members[1].close()
            load(*call)

        if moment == "in the load":
            monkeypatch.setattr(Team, "load", lose_before)
        else:
            monkeypatch.setattr(gang, "run", lose)
        rows = [{"x": np.ones((1, 3, 8, 8), np.float32)}]
        assert len(predictor.load(version.weight_file()).predict_batch(rows)) == 1


def test_a_version_that_ends_workers_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    version = gang_models.register("ConvNet")
    with started(ThreadLauncher()) as gang:
        predictor, lost = predictor_of(version, gang), []

        def lose(*call: Any) -> Any:
            lost.append(call)
            raise GangLost("killed")

        monkeypatch.setattr(gang, "run", lose)
        with pytest.raises((WeightsError, GangLost)):
            predictor.load(version.weight_file())
        assert len(lost) == 2
