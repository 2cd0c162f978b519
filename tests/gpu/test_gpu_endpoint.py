"""A whole replica that serves from a CUDA device: plan, staging, batcher and HTTP application, without Ray."""

import asyncio
from typing import Any

import pytest
from captures import count_captures

from registered import LINEAR, SIGNATURE, constant, register
from serving.replica_set import infer, serving_one, until
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.weights import WeightStore

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}], ids=["eager", "graphs"])
async def test_a_replica_answers_over_http_from_the_device(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered versions rolled out, and a live model, while both are asked."""
    count_captures(monkeypatch, device)
    model = {**(options or {"device": device}), "max_batch_size": 8}
    register(aliases=("champion",))

    store = WeightStore()
    live = EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))
    async with serving_one("linear@champion", live, model=model) as (endpoint, replica):
        devices = list(replica.manager.get_model("linear").predictor._templates)
        assert devices == [device], devices
        assert (await infer(replica)).version == 1
        register(aliases=("champion",))
        for version in range(1, 11):
            store.publish(constant(version))
            asked = [infer(replica, rows=1 + rows % 8) for rows in range(16)]
            for answer in await asyncio.gather(*asked):
                assert answer.status == 200, answer.body
            await until(lambda expected=version: endpoint.versions("live") == [expected])
            for answer in await asyncio.gather(*[infer(replica, "live", rows=rows) for rows in (1, 3, 8)]):
                assert (answer.status, answer.version) == (200, version), answer.body
        store.close()
