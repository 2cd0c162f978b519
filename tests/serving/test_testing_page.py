"""An endpoint in a test's process is what its page says; `training/test_training_docs` has the blocks of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from registered import register
from shoal.errors import InferenceError, RegistryError
from shoal.registry import Registry
from shoal.testing import Endpoint
from waiting import wait_for


def test_an_endpoint_follows_an_alias_and_has_the_errors_of_one_that_is_deployed(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="nobody"), Endpoint("nobody", home=tmp_path):
        pass
    register(aliases=("champion",))
    register()
    with Endpoint("linear@champion", token="a-token") as endpoint:
        assert endpoint.infer("linear", [[0.0, 0.0, 0.0]])["y"].tolist() == [[1.0, 1.0]]
        with pytest.raises(InferenceError, match="expected FP32"):
            endpoint.infer("linear", [[0.0]])
        with endpoint.client(token="another") as stranger, pytest.raises(InferenceError, match="known key"):
            stranger.models()
        Registry().promote("linear@2", "champion")
        wait_for(lambda: endpoint.infer("linear", [[0.0, 0.0, 0.0]]).version == 2)
