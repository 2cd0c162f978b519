"""What Serve is told of gRPC, and where its own servers listen for it."""

from __future__ import annotations

from typing import Any

import pytest


def test_every_process_that_gets_the_options_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On their way to Serve's fallback proxy, where nothing else of ours runs, they are copied and pickled."""
    from ray import cloudpickle
    from ray.serve._private.grpc_util import set_proxy_default_grpc_options

    from shoal.serve.on_ray import bind_address as ray_grpc

    called: list[bool] = []
    monkeypatch.setattr(ray_grpc, "patch_bind_addresses", lambda: called.append(True))
    options: Any = ray_grpc.grpc_options(5)
    for hops in (1, 2):
        options = cloudpickle.loads(cloudpickle.dumps(set_proxy_default_grpc_options(options)))
        assert len(called) == hops
    assert options.port == 5
    assert not options.enable_reflection
