"""The serve apps: their specs are checked, and what they compute before and after a forward is what they say."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.flows.serving_spec import load_serving_spec
from shoal.models.lenet import MEAN, STD, normalise, probabilities

APPS = Path(__file__).parents[2] / "serve_apps"


def test_pixels_become_what_the_recipe_trains_on_and_logits_probabilities() -> None:
    pixels = np.array([[0.0, 73.0, 255.0]], np.float32)
    normal = normalise({"input": pixels})["input"]
    np.testing.assert_allclose(normal, (pixels - MEAN) / STD, rtol=1e-6)
    assert normal.dtype == np.float32
    logits = np.array([[1.0, 2.0, 1000.0], [0.0, 0.0, 0.0]], np.float32)
    expected = torch.softmax(torch.from_numpy(logits), 1).numpy()
    np.testing.assert_allclose(probabilities({"output": logits})["output"], expected, atol=1e-7)


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_bytes(b"models: [m]  # f\xfcr alle\n")
    with pytest.raises(ConfigError, match=r"file = .*shop.yaml.*cannot be read: .*give a file of YAML"):
        load_serving_spec(tmp_path / "shop.yaml")


@pytest.mark.parametrize("name", ["image_classifier", "live_policy", "roots", "trees"])
def test_every_file_names_programs_that_exist(name: str) -> None:
    for word in (APPS / f"{name}.yaml").read_text().split():
        if word.startswith("serve_apps/"):
            assert (APPS.parent / word).is_file(), word
