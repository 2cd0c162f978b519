"""An endpoint on Ray whose replicas follow its load: Serve sees none of the requests, its policy sees all of them."""

from collections.abc import Iterator

import pytest

from endpoint_process import Client, EndpointProcess
from waiting import wait_for

TIMEOUT_S = 300.0
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    # No forward is this short, so any request at all needs every replica, however fast the machine is.
    with EndpointProcess(scale={"max": 2, "objective_s": 1e-7}, num_cpus=0.1) as process:
        yield process


def test_requests_that_bypass_serve_bring_another_replica(endpoint: EndpointProcess) -> None:
    endpoint.publish(1)
    client = Client(endpoint.url)
    wait_for(lambda: client.infer()[0] == 200, TIMEOUT_S)

    def has_two_replicas() -> bool:
        assert client.infer()[0] == 200
        return len(endpoint.stats()) == 2

    wait_for(has_two_replicas, TIMEOUT_S)
    client.close()
