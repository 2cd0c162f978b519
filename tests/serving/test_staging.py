"""A version that is built in another way than the one before it: what it must show before anybody may ask it."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from registered import tensors
from shoal.registry import ModelFactory, Registry, Signature
from shoal.serve.model.predictor import LoadedModel
from shoal.serve.replica.loader import StagedVersion, StagingError, VersionLoader
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.model_source import ModelPackage, RegisteredModel
from shoal.weights import WeightSnapshot

SIGNATURE = Signature(inputs=tensors(x=[-1, -1]), outputs=tensors(y=[-1, 1]))  # open: improbable

HOOKED = ("preprocess1", "preprocess2", "postprocess1", "postprocess2")  # a hook may have a state of its own


class Sum(nn.Module):
    """Of each row; or it fails, or gives NaN."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "raises":
            raise RuntimeError("version is bad")
        if self.fault.startswith("cannot"):
            raise RuntimeError(self.fault)
        return x.sum(1, keepdim=True) * (torch.nan if self.fault == "nan" else 1.0)


def staged(faults: list[str]) -> StagedVersion:
    """The last of versions that were staged one after the other, each with such a fault."""
    packages = [
        ModelPackage(
            ModelFactory(factory=f"{__name__}:Sum", kwargs={"fault": fault}), SIGNATURE, WeightSnapshot.of(version, {})
        )
        for version, fault in enumerate(faults, start=1)
    ]
    source = SimpleNamespace(name="m", load_package=lambda version: packages[version - 1])

    async def body(stager: VersionLoader) -> StagedVersion:
        last: StagedVersion | None = None
        for version in range(1, len(packages) + 1):
            before = last.predictor if last is not None else None
            last = await stager.load_version(source, version, ModelOptions(max_batch_size=4), before)  # type: ignore[arg-type]
        assert last is not None
        return last

    with closing(VersionLoader(1)) as stager:
        return asyncio.run(body(stager))


@pytest.mark.parametrize(("fault", "reason"), [("raises", "version is bad"), ("nan", "output 'y' is not finite")])
def test_a_version_built_in_another_way_must_answer_what_the_one_before_it_did(fault: str, reason: str) -> None:
    with pytest.raises(StagingError, match=f"version 2 cannot answer an example: .*{reason}"):
        staged(["", fault])


def test_what_a_model_says_that_no_file_could_hold_is_told_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The controller writes it down: a file name in no encoding, say, or all that a model was given."""
    caplog.set_level(logging.CRITICAL + 1, "shoal.serve.replica.loader")  # xdist could not send what is logged
    with pytest.raises(StagingError, match="cannot read") as caught:
        staged(["", "cannot read caf\udce9.txt" + 100_000 * "!"])
    assert len(str(caught.value).encode()) < 3000


def test_where_none_has_answered_the_example_another_may_come_unproved() -> None:
    assert staged(["raises", "nan", ""]).loaded.version == 3


def test_models_that_are_built_alike_share_a_template_and_nothing_else() -> None:
    """Of a hundred models of one architecture all but the first load without its construction and its warm-up."""

    def package(number: int, width: int = 1, **change: str) -> ModelPackage:
        signature = Signature(inputs=tensors(x=[-1, width]), outputs=tensors(y=[-1, 1]))
        factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": width, "out_features": 1}, **change)
        arrays = {"weight": np.zeros((1, width), np.float32), "bias": np.full(1, number, np.float32)}
        return ModelPackage(factory, signature, WeightSnapshot.of(number, arrays))

    packages = {"a": package(1), "b": package(2), "wide": package(3, width=2), "c": package(4)}
    packages |= {name: package(5, **{name[:-1]: f"{__name__}:make_step"}) for name in HOOKED}

    async def body(loader: VersionLoader) -> dict[str, StagedVersion]:
        async def load(name: str, options: ModelOptions) -> StagedVersion:
            source = SimpleNamespace(name=name, load_package=lambda version: packages[name])
            return await loader.load_version(source, packages[name].snapshot.version, options, None)  # type: ignore[arg-type]

        found = {name: await load(name, ModelOptions(max_batch_size=4)) for name in packages}
        return found | {"short": await load("a", ModelOptions(max_batch_size=2))}

    with closing(VersionLoader(1, num_threads=2, num_alike=2)) as loader:
        found = asyncio.run(body(loader))
    of = {name: each.predictor for name, each in found.items()}
    assert of["a"] is of["b"] is of["c"]
    assert len({id(each) for each in of.values()}) == 3 + len(HOOKED)
    x = np.ones((1, 1), np.float32)
    answers = {name: found[name].loaded.predict_batch([{"x": x}])[0]["y"].tolist() for name in ("a", "b", "c")}
    assert answers == {"a": [[1.0]], "b": [[2.0]], "c": [[4.0]]}


def make_step(in_features: int, out_features: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """A hook that changes names alone, for the kwargs of torch.nn.Linear."""
    return lambda arrays: {"y" if name == "output" else name: array for name, array in arrays.items()}


def test_versions_with_other_code_answer_side_by_side_and_may_be_required_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    snapshot, signature = (
        WeightSnapshot.of(1, {}),
        Signature(inputs=SIGNATURE.inputs, outputs=tensors(y=[-1, -1])),
    )
    for added in (1, 200):
        text = f"import torch\nclass Shift(torch.nn.Module):\n    def forward(self, x): return x + {added}\n"
        (tmp_path / "shifting.py").write_text(text)
        Registry().register("shift", snapshot, model=ModelFactory(factory="shifting:Shift"), signature=signature)

    async def load(loader: VersionLoader) -> list[LoadedModel]:
        source, first = RegisteredModel("shift", Registry().location), None
        loaded = []
        for version in (1, 2):
            first = await loader.load_version(source, version, ModelOptions(), first and first.predictor)
            loaded.append(first.loaded)
        return loaded

    with closing(VersionLoader(1)) as loader:
        found = asyncio.run(load(loader))
    x = np.ones((1, 2), np.float32)
    assert [each.predict_batch([{"x": x}])[0]["y"].tolist() for each in found] == [[[2.0, 2.0]], [[201.0, 201.0]]]
    with (
        closing(VersionLoader(1, code="installed")) as loader,
        pytest.raises(StagingError, match=r"shifting\.py differs"),
    ):
        asyncio.run(load(loader))
