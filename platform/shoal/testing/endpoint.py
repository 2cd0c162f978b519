"""An endpoint in this process: the replica, controller and protocols of a deployed one, without Ray and HAProxy.

Used by tests. It listens on a free port of 127.0.0.1, so that every client of an endpoint can call it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast
from unittest.mock import patch

import httpx2
import uvicorn
from anyio.from_thread import start_blocking_portal

from shoal.client import Answer, Client
from shoal.client.payload import Inputs
from shoal.home import load_access_token
from shoal.serve.controller.config import build_controller_config
from shoal.serve.controller.service import ControllerService
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, model_from_ref

TIMEOUT_S = 60.0
POLL_S = 0.005


class Endpoint:
    """An endpoint of one replica, for the length of a `with` block.

    models: of the registry: `name@version`, `name@alias` (the endpoint follows it), or `name` for the newest now; or
            an `EndpointModel`, such as one that follows the weights of a run
    home:   stands in for $SHOAL_HOME within the block; None: as it is set
    fields: of EndpointSpec: `model={"max_batch_size": 8}`, `show_errors=True`. Of the ports, replicas and workers none
            has an effect

    The block raises ConfigError, RegistryError for unknown models, ShoalError for one that cannot be loaded.

        def test_the_line_is_served(tmp_path, monkeypatch):
            monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
            result = shoal.fit(Line, stop={"epochs": 20}, say=None)
            with shoal.testing.Endpoint(result.model) as endpoint:
                answer = endpoint.infer("line", [[3.0]])
                assert answer.version == 1
                assert endpoint.call("GET", "/v2/models/other").status_code == 404

    url:   the root of the protocol
    token: required from callers
    """

    url: str
    token: str

    def __init__(self, *models: str | EndpointModel, home: Path | None = None, **fields: Any) -> None:
        self._models = models
        self._home = home
        self._fields = {"name": "test", **fields}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            if self._home is not None:
                closing.enter_context(patch.dict(os.environ, SHOAL_HOME=str(self._home)))
            self.token = str(self._fields.setdefault("token", load_access_token()))
            spec = EndpointSpec.parse(self._fields)
            models = [model_from_ref(each) if isinstance(each, str) else each for each in self._models]
            portal = closing.enter_context(start_blocking_portal())
            self.url = closing.enter_context(portal.wrap_async_context_manager(_serve(spec, models)))
            self._client = closing.enter_context(self.client())
            headers = {"authorization": f"Bearer {self.token}"}
            self._http = closing.enter_context(
                httpx2.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
            )
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def client(self, **options: Any) -> Client:
        """A client of this endpoint; `options` as `shoal.Client` takes them."""
        return Client(self.url, **{"token": self.token, "timeout_s": TIMEOUT_S, **options})

    def infer(self, model: str, inputs: Inputs, **options: Any) -> Answer:
        """The outputs of a model; see `shoal.Client.infer`. Raises InferenceError, ConfigError."""
        return self._client.infer(model, inputs, **options)

    def call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Any request, with the token. options: `json`, `content`, `headers` and others of `httpx2.Client.request`"""
        return self._http.request(method, path, **options)


@asynccontextmanager
async def _serve(spec: EndpointSpec, models: Sequence[EndpointModel]) -> AsyncIterator[str]:
    """The address of an endpoint on this event loop."""
    config, live = build_controller_config(spec, models)
    # Its reports of other replicas, of which there are none, are the only answer that is not a client's.
    controller = cast(ControllerClient, ControllerService(config))
    replica = EndpointReplica("test", spec, live, controller)
    try:
        await replica.start(TIMEOUT_S)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(replica.app, lifespan="off", ws="none", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(POLL_S)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}{spec.route_prefix}"
            finally:
                server.should_exit = True
                await serving
    finally:
        await replica.close()
