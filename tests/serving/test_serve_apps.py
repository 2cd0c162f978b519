"""The serve apps: their specs are checked, and what they compute before and after a forward is what they say."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError, RegistryError
from shoal.flows.serving_spec import check, load_serving_spec
from shoal.libs.trees.syntax_tree import KINDS, MASKED
from shoal.models.lenet import MEAN, STD, normalise, probabilities
from shoal.registry import Registry
from shoal.serve.model.predictor import Predictor
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel

APPS = Path(__file__).parents[2] / "serve_apps"


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(APPS))
    sys.modules["shoal.flows.serving"] = ModuleType("shoal.flows.serving")  # which needs Ray, and is not run here
    sys.modules["shoal.flows.serving"].serve_models = None  # type: ignore[attr-defined]
    sys.modules["shoal.cluster.job_main"] = ModuleType("shoal.cluster.job_main")
    sys.modules["shoal.cluster.job_main"].job_main = None  # type: ignore[attr-defined]
    threads = torch.get_num_threads()
    yield importlib.import_module("syntax_tree")
    torch.set_num_threads(threads)
    for name in ("syntax_tree", "shoal.flows.serving", "shoal.cluster.job_main"):
        del sys.modules[name]


def test_pixels_become_what_the_recipe_trains_on_and_logits_probabilities() -> None:
    pixels = np.array([[0.0, 73.0, 255.0]], np.float32)
    normal = normalise({"input": pixels})["input"]
    np.testing.assert_allclose(normal, (pixels - MEAN) / STD, rtol=1e-6)
    assert normal.dtype == np.float32
    logits = np.array([[1.0, 2.0, 1000.0], [0.0, 0.0, 0.0]], np.float32)
    expected = torch.softmax(torch.from_numpy(logits), 1).numpy()
    np.testing.assert_allclose(probabilities({"output": logits})["output"], expected, atol=1e-7)


def test_formulas_are_trees(trees: ModuleType) -> None:
    assert trees.tree_of("not (True and False)") == [(4, -1), (2, 0), (0, 1), (1, 1)]
    both = trees.as_arrays(["True", "True or False"])
    assert both["tokens"].tolist() == [[0, -1, -1], [3, 0, 1]]
    assert both["parents"].tolist() == [[-1, -1, -1], [-1, 0, 0]]
    with pytest.raises(ValueError, match="'1' is none of True, False, and, or, not"):
        trees.tree_of("True and 1")


def test_a_tree_lstm_learns_what_formulas_are_worth_and_is_served_as_its_file_says(trees: ModuleType) -> None:
    spec = load_serving_spec(APPS / "syntax_tree.yaml")
    with pytest.raises(RegistryError, match="there is no model 'syntax'"):
        check(spec)
    trees.train(steps=80)
    check(spec)
    package: ModelPackage = RegisteredModel("syntax", Registry().location).load_package(1)
    predictor: Any = Predictor(package.factory, package.signature, spec.endpoint.options("syntax"))
    assert package.snapshot is not None
    formulas = [trees.formula(random.Random(seed), 3) for seed in range(60)]
    requests = [trees.as_arrays(formulas[start : start + 6]) for start in range(0, 60, 6)]
    answers = predictor.load(package.snapshot).predict_batch(requests)
    worth = np.concatenate([answer["logits"].argmax(1) for answer in answers])
    assert np.mean(worth == [int(eval(each)) for each in formulas]) > 0.9


def test_code_is_a_request_with_each_inner_node_hidden_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APPS))
    request, hidden = importlib.import_module("trees_client").hide_each("x = -f(1)")
    assert [(node, KINDS[kind]) for node, kind in hidden] == [(0, "Assign"), (2, "UnaryOp"), (3, "Call")]
    assert np.argwhere(request["tokens"] == MASKED).tolist() == [[0, 0], [1, 2], [2, 3]]
    assert (request["parents"] == [-1, 0, 0, 2, 3, 3]).all()


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_bytes(b"models: [m]  # f\xfcr alle\n")
    with pytest.raises(ConfigError, match=r"file = .*shop.yaml.*cannot be read .*give a YAML file"):
        load_serving_spec(tmp_path / "shop.yaml")


@pytest.mark.parametrize("name", ["image_classifier", "live_policy", "roots", "syntax_tree", "trees"])
def test_every_app_has_its_file_and_its_client(name: str) -> None:
    assert (APPS / f"{name}.yaml").is_file()
    assert (APPS / f"{name}_client.py").is_file()
    for line in (APPS / f"{name}.py").read_text().split('"""')[1].splitlines():
        for word in line.split():
            if word.startswith("serve_apps/"):
                assert (APPS.parent / word).is_file(), word
