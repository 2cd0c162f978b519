"""Clients of an endpoint that does not answer: they leave in time."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from shoal.client import AsyncClient, Client
from shoal.errors import InferenceError

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_an_endpoint_that_does_not_answer_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        with client, pytest.raises(InferenceError, match=r"no answer within 0.2 s") as late:
            client.metadata("m")
    assert late.value.status == 504


def test_a_deadline_is_also_for_the_first_call_which_asks_for_the_signature() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def ask() -> None:
            async with AsyncClient(url, timeout_s=1.0) as client:
                await client.infer("m", ROWS, deadline_s=0.2)

        with pytest.raises(InferenceError, match=r"no answer within 0.2 s") as late:
            asyncio.run(ask())
        with Client(url, timeout_s=1.0) as client, pytest.raises(InferenceError, match=r"no answer within 0.2 s"):
            client.infer("m", ROWS, deadline_s=0.2)
    assert late.value.status == 504
