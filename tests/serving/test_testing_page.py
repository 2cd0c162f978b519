"""The page about tests of a user's own: its block is a test that passes, and an endpoint is what it says."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from registered import register
from shoal.errors import InferenceError, RegistryError
from shoal.registry import Registry
from shoal.testing import Endpoint
from waiting import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_test_of_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "page_of_tests.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("page_of_tests")
    page.test_the_line_is_served(tmp_path / "home", monkeypatch)
    del sys.modules["page_of_tests"]


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
