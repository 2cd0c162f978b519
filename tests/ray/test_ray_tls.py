"""An endpoint with TLS as a user has it: deployed, asked over https and gRPC, its certificate replaced meanwhile."""

from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from certificates import Authority
from registered import register
from shoal.cli import cli
from shoal.client import Client, ConnectionLost
from shoal.client.discovery import find_endpoint, token_for
from shoal.client.endpoint_status import EndpointStatus
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.flows.serving import record_endpoint
from shoal.flows.serving_spec import ServingSpec
from shoal.libs.grpc.methods import METHODS, SERVICE
from waiting import wait_for

END_S = 300.0
NAME = "encrypted"
ROW = [[3.0] * 3]


def say(*words: str) -> str:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_endpoint_that_is_reached_over_tls(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(NAME)
    authority = Authority(tmp_path)
    files = authority.sign()
    tls = {"certificate": files.certificate, "key": files.key}
    fields = {"num_cpus": 0.1, "host": "::", "tls": tls, "grpc_port": 0, "trusted_proxies": ["127.0.0.0/8"]}
    fields["ingress"] = "every_node"  # of which there is one
    spec = ServingSpec.parse({"models": [NAME], "endpoint": fields})
    with record_endpoint(spec) as endpoint:
        assert endpoint.url.startswith("https://localhost:")
        assert find_endpoint(NAME).url == endpoint.url
        with (
            Client(endpoint.url, num_retries=0) as client,
            pytest.raises(ConnectionLost, match=r"CERTIFICATE.*--ca FILE"),
        ):
            client.infer(NAME, ROW)
        ca = ("--ca", str(authority.ca))
        assert "1.0" in say("predict", NAME, "--input", "3,3,3", *ca)
        assert "certificate: 29 days left" in say("serve", "status", NAME, "--once", *ca)
        monkeypatch.setenv("SHOAL_CA", str(authority.ca))
        with Client(endpoint.url, token=token_for(endpoint.url)) as client:
            status = client.status()
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            with grpc.secure_channel(status.grpc, credentials) as channel:
                method = METHODS["ServerLive"]
                call = channel.unary_unary(
                    f"/{SERVICE}/ServerLive", method.request.SerializeToString, method.response.FromString
                )
                assert call(method.request(), timeout=END_S).live
            authority.sign(days=100)

            def get_status() -> EndpointStatus:
                assert client.infer(NAME, ROW)["y"].tolist() == [[1.0, 1.0]]
                return client.status()

            wait_for(lambda: days_remaining(get_status()) > 90, END_S, "the new certificate")
            assert [event.kind for event in get_status().events][-1] == "certificate_replaced"
            Path(files.key).write_text("no key")
            wait_for(lambda: problem(get_status()), END_S, "the report of a bad one")
            assert "endpoint.tls.key" in problem(get_status())
            assert "the replacement is not used" in say("serve", "status", NAME, "--once")
        with Client(endpoint.url, token=token_for(endpoint.url)) as client:  # connects anew
            assert client.infer(NAME, ROW)["y"].tolist() == [[1.0, 1.0]]
            assert days_remaining(client.status()) > 90


def days_remaining(status: EndpointStatus) -> float:
    assert status.certificate is not None
    return status.certificate.days_remaining


def problem(status: EndpointStatus) -> str:
    assert status.certificate is not None
    return status.certificate.problem
