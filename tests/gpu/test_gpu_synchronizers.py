"""Replicas that share one CUDA device: servers, rounds and sums are on the host, and the steps are the CPU's."""

from typing import Any

import pytest
from gpu_tasks import CLOSE, assert_same_weights, make_spec

from shoal.train.launch.local import fit_locally
from shoal.train.reporting.result import TrainResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
SGD = {"name": "sgd", "learning_rate": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "parameter_server": {"sync": {"kind": "parameter_server", "servers": 2}, "workers": 2},
    "frames": {"sync": {"kind": "parameter_server", "transport": "frames"}, "workers": 2},
    "local_sgd": {"sync": {"kind": "local_sgd", "every": 2}, "workers": 2},
    "diloco": {"sync": {"kind": "diloco", "every": 2}, "workers": 2},
    "elastic": {"workers": [2, 2]},
}


def fit(device: str, **fields: Any) -> TrainResult:
    spec = make_spec(optimizer=SGD, stop={"steps": 4}, evaluate={"every_steps": 4}, device=device, **fields)
    return fit_locally(spec, registers=False)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_on_one_device_take_the_steps_of_workers_on_the_cpu(kind: str, device: str) -> None:
    found = fit(device, **KINDS[kind])
    assert found.steps >= 4
    assert_same_weights(found, fit("cpu", **KINDS[kind]), **CLOSE)
