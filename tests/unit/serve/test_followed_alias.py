"""An endpoint follows an alias in a bucket without waiting for the bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bucket_server import bucket_environment, open_bucket  # noqa: F401 - a fixture
from shoal.errors import RegistryError, StoreError
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.spec import model_source
from shoal.serve.spec.model_source import RegistryCatalogue
from shoal.store import Store
from shoal.weights import WeightSnapshot
from waiting import wait_for


def test_a_moved_alias_is_seen_and_a_bucket_that_fails_is_told(
    bucket_environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_source, "FOLLOW_S", 0.0)
    registry = Registry(f"{open_bucket(bucket_environment, monkeypatch).url}/followed")
    for number in (1, 2):
        registry.register(
            "linear",
            WeightSnapshot.of(1, {"w": np.array([float(number)])}),
            model=ModelFactory(factory="a:b"),
            signature=Signature(inputs=[], outputs=[]),
            aliases=["champion"] if number == 1 else [],
        )
    catalogue = RegistryCatalogue(registry.location)
    assert catalogue.follow("linear", "champion") == 1
    registry.promote("linear@2")
    wait_for(lambda: catalogue.follow("linear", "champion") == 2)

    def refuse(store: Store, key: str) -> bytes:
        raise StoreError("the bucket does not answer")

    def is_told() -> bool:
        try:
            catalogue.follow("linear", "champion")
        except RegistryError as error:
            return "does not answer" in str(error)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.store), "read", refuse)
        wait_for(is_told)
    wait_for(lambda: not is_told())
    assert catalogue.follow("linear", "champion") == 2
