"""Workers on other hosts than the replica's read a version that is in a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from shoal.errors import WeightsError
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.gang.shard import find_file
from shoal.weights import WeightSnapshot


def test_a_worker_downloads_what_the_replicas_host_has(
    bucket_environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "replica"))
    registry = Registry(f"{open_bucket(bucket_environment, monkeypatch).url}/shared")
    snapshot, factory = WeightSnapshot.of(1, {"w": np.ones(3)}), ModelFactory(factory="a:b")
    nothing = Signature(inputs=[], outputs=[])
    version = registry.register("linear", snapshot, model=factory, signature=nothing, aliases=[])
    sent = version.weight_file()
    assert find_file(sent) is sent
    content = sent.path.read_bytes()
    sent.path.unlink()  # the worker's host has another disk
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "worker"))
    found = find_file(sent)
    assert found.path.is_relative_to(tmp_path / "worker")
    assert found.path.read_bytes() == content
    assert found.is_verified
    found.path.unlink()
    registry.remove("linear@1")
    with pytest.raises(WeightsError, match="weights version 1 cannot be read"):
        find_file(sent)
