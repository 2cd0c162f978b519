"""The pages on serving: every block of Python and YAML is used, against an endpoint of this process."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import shoal.runs
from blocks import DOCS, read_blocks
from registered import tensors
from serving.fake_host import FakeHost, FakeModel
from serving.served_here import TOKEN, served
from shoal.client.endpoint_status import EndpointStatus, ModelStatus, RolloutEvent, VersionStatus
from shoal.flows.serving_spec import check, load_serving_spec
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.registry import Registry
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from shoal.serve.spec.scale import ScaleSpec

PARTS = ("clients", "canaries", "reach", "replicas", "scaling", "live-policies")
PAGES = ["serving.md", *(f"serving/{part}.md" for part in PARTS)]
APPS = DOCS.parent / "serve_apps"
TEXT = "\n".join((DOCS / page).read_text() for page in PAGES)


class Host(FakeHost):
    """Promotes what it is told to; `episodes`: the requests of episodes, in order."""

    url: str

    def __init__(self, *models: FakeModel) -> None:
        super().__init__(*models)
        self.episodes: list[EpisodeRequest] = []

    async def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer:
        self.episodes.append(request)
        return await super().take_episode(request)

    async def administer(self, change: Mapping[str, Any], *caller: object) -> dict[str, Any]:
        await super().administer(change, *caller)
        return dict(msgspec.to_builtins(ModelStatus("mine", versions=[VersionStatus(2, "stable", 1.0)])))

    async def status(self) -> dict[str, Any]:
        events = [RolloutEvent(0.0, str(change["action"])) for change in self.changes]
        return dict(msgspec.to_builtins(EndpointStatus("shop", events=events)))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """An endpoint with the page's model, in the run record."""
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    double = FakeModel(
        "mine",
        tensors(input=[-1, 4]),
        tensors(output=[-1, 2]),
        lambda inputs: {"output": np.repeat(inputs["input"].sum(1, keepdims=True), 2, 1)},
    )
    host = Host(double, FakeModel("cartpole"))
    with served(host) as (host.url, _), shoal.runs.create("serve", "") as recorder:
        recorder.record_endpoint("mine", "inference", host.url, "ready")
        yield host


def test_the_python_of_the_page_runs(endpoint: Host, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"URL": endpoint.url, "KEY": TOKEN}
    for block in [each for page in PAGES for each in read_blocks(page)]:
        exec(block, names)
    assert Registry().get("mine@champion").snapshot().tensors().keys() == {"weight", "bias"}
    said = capsys.readouterr().out
    assert "[[4. 4.]\n [4. 4.]] 7" in said
    assert str([7] * 32) in said
    assert "['canary', 'metric', 'promote']" in said
    assert [(call.episode, call.reward, call.ended) for call in endpoint.episodes] == [
        ("", None, False),
        ("1-0-ff", 1.0, False),
        ("1-0-ff", None, False),
        ("1-0-ff", 1.0, True),
    ]
    assert [call.sticky for call in endpoint.models_by_name["mine"].calls[:2]] == ["", "customer 17"]


def test_the_yaml_of_the_page_is_a_spec(tmp_path: Path) -> None:
    exec(read_blocks("serving.md")[0], {})
    specs = []
    for text in [each for page in PAGES for each in read_blocks(page, "yaml")]:
        (tmp_path / "shop.yaml").write_text(text)
        specs.append(load_serving_spec(tmp_path / "shop.yaml"))
        check(specs[-1])
    spec, encrypted, everywhere = specs
    assert encrypted.endpoint.tls is not None
    assert everywhere.endpoint.ingress == "every_node"
    assert (spec.models, spec.endpoint.name, spec.endpoint.model.deadline_s) == (["mine@champion"], "shop", 0.5)
    assert spec.endpoint.keys[0].models == ["mine"]


@pytest.mark.parametrize("path", sorted(APPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_apps_files_are_specs(path: Path) -> None:
    spec = load_serving_spec(path)
    assert spec.models
    assert spec.endpoint.name != EndpointSpec(name="x").name


def test_the_fields_that_the_page_names_are_fields() -> None:
    expected = {"endpoint": EndpointSpec, "endpoint.model": ModelOptions, "endpoint.scale": ScaleSpec}
    tables = re.findall(r"\| field of `([\w.]+)` .*?\n\|[-|]+\n(.*?)\n\n", TEXT, re.DOTALL)
    assert {name for name, _ in tables} == expected.keys()
    for name, rows in tables:
        for row in rows.splitlines():
            for field in re.findall(r"`([a-z_]+)`", row.split("|")[1]):
                assert field in expected[name].model_fields, field
