"""Whatever is no value of a field of an endpoint is rejected by the field's name, before anything starts."""
# Some endpoints here have a port for gRPC, which shoal.libs.grpc answers.

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from pydantic import BaseModel, SecretStr

import shoal.cli
from certificates import Authority
from shoal.client.requests import build_rollout_request
from shoal.cluster.ingress import front
from shoal.errors import ConfigError, InferenceError
from shoal.flows.serving_spec import ServingSpec, check_address
from shoal.serve.controller.change_request import parse_options
from shoal.serve.spec.endpoint import EndpointSpec

HUGE = 10**400
# By type: what no field of it takes. A field's own bounds and forms are below.
NO_NUMBER = ["", "many", True, [], {}, [1], {"a": 1}, HUGE]
BAD: dict[Any, list[Any]] = {
    int: [*NO_NUMBER, 1.5, -1, float("nan"), float("inf")],
    float: [*NO_NUMBER, float("nan"), float("inf"), float("-inf")],
    bool: ["", "maybe", 2, [], {}, None],
    datetime: [*NO_NUMBER, 30, "2027-13-01", "99999999999d"],
    str: [1, True, 1.5, [], {}, None],
    SecretStr: [1, True, [], {}, "", "two words", "\n", "ä"],
    list: ["", "text", 1, True, {"a": 1}, [1], None],
    dict: ["", "text", 1, True, [], [1], None],
}
FREE = {"model.pad_value": {float("nan"), float("inf"), float("-inf")}}  # fields that take some of it
BASE = {"scale": {"max": 2}, "tls": {"certificate": "/c", "key": "/k"}, "keys": {"name": "a", "key": "k"}}


def list_fields(spec: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in spec.model_fields.items():
        types = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
        inner = next((each for each in types if issubclass(each, BaseModel)), None)
        yield f"{path}{name}", field.annotation
        if inner is not None and get_origin(field.annotation) is not dict:
            yield from list_fields(inner, f"{path}{name}.")


def list_bad(path: str, annotation: Any) -> list[Any]:
    args = get_args(annotation)
    is_optional = NoneType in args
    if is_optional:
        annotation = next(each for each in args if each is not NoneType)
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    kind = get_origin(annotation) or annotation
    if kind is Literal:
        kind = str
    bad = BAD[dict if isinstance(kind, type) and issubclass(kind, BaseModel) else kind]
    free = FREE.get(path, ())
    return [each for each in bad if not (is_optional and each is None) and str(each) not in map(str, free)]


def put(path: str, value: Any) -> dict[str, Any]:
    """The smallest fields of an endpoint with this value at the path."""
    first, _, rest = path.partition(".")
    inner = value if not rest else {**BASE.get(first, {}), **put(rest, value)}
    return {first: [inner] if first == "keys" and rest else inner}


@pytest.mark.parametrize(("path", "annotation"), list(list_fields(EndpointSpec)))
def test_what_is_no_value_of_a_field_is_rejected_by_name(path: str, annotation: Any) -> None:
    for value in list_bad(path, annotation):
        with pytest.raises(ConfigError) as caught:
            EndpointSpec.parse({"name": "m", **put(path, value)})
        field, given = caught.value.field.replace("keys.0", "keys"), caught.value.value
        assert field.startswith(path), (value, caught.value)
        given = [given] if caught.value.field == "keys.0" else given
        assert field != path or isinstance(given, SecretStr) or repr(given) == repr(value)
        assert len(str(caught.value)) < 2 * len(path) + 400


SCALE, TLS = {"max": 4}, BASE["tls"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("host", "0.0.0.0", "insecure: true"),
        ("host", "::", "tls.certificate"),
        ("ingress", "each", "every_node"),
        ("name", "a/b", "pattern"),
        ("token", "**********", "masked"),
        ("retries", 3, "no such field"),
        ("num_gpus", 1.5, "whole number"),
        ("model", {"max_batch_size": 16, "max_queue_size": 8}, "max_queue_size = 8 is below max_batch"),
        ("trusted_proxies", ["10.0.0.0/8"] * 51, "at most 50"),
        ("ingress_threads", 65, "64"),
        ("port", 65536, "65535"),
        ("num_replicas", 10**6, "10000"),
        ("num_cpus", -0.5, "greater"),
        ("max_memory_gib", 0, "greater than 0"),
        ("max_body_bytes", 0, "greater"),
        ("max_body_bytes", 1 << 63, "less"),
        ("torch_threads", 10**6, "1024"),
        ("hang_s", 0, "greater than 0"),
        ("drain_s", -1, "greater than 0"),
        ("wait", -1, "greater"),
        ("wait", "soon", "number"),
        ("trace", "http://a", "otlp://HOST:PORT"),
        ("model.preprocess", "clean", "module:name"),
        ("model.deadline_s", -1, "greater than 0"),
        ("model.weight", 0, "greater than 0"),
        ("model.guard.max_error_rate", 1.5, "less"),
        ("model.guard.max_errors", 1, "no such field"),
        ("models.a.precision", "fp8", "fp32"),
    ],
)
def test_a_value_beyond_its_bounds_is_rejected_by_its_field(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EndpointSpec.parse({"name": "m", **put(path, value)})
    assert caught.value.field == path


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tls": TLS, "insecure": True}, "insecure", "contradicts tls"),
        ({"tls": {"certificate": "/c"}}, "tls.key", "required"),
        ({"tls": {"key": "/k"}}, "tls.certificate", "required"),
        ({"tls": {**TLS, "client_ca": "ca.pem"}}, "tls.client_ca", "full path"),
        ({"tls": {**TLS, "name": "two words"}}, "tls.name", "no name of a host"),
        ({"tls": {**TLS, "name": "a\n"}}, "tls.name", "no name of a host"),
        ({"tls": {**TLS, "authority": "/a"}}, "tls.authority", "no such field"),
        ({"host": "fe80::1%eth0", "insecure": True}, "host", "is no address"),
        ({"trusted_proxies": ["10.0.0.7/8"]}, "trusted_proxies.0", "no network"),
        ({"port": 8000, "grpc_port": 8000}, "EndpointSpec", "grpc_port = 8000 is where HTTP listens"),
        ({"scale": SCALE, "num_replicas": 2}, "EndpointSpec", "scale.min"),
        ({"keys": [{"name": "a", "key": "k"}, {"name": "a", "key": "l"}]}, "EndpointSpec", "own name"),
        ({"keys": [{"name": "a", "key": "k", "burst": 0}]}, "keys.0.burst", "greater"),
        ({"keys": [{"name": "a", "key": "k", "requests_per_s": 0}]}, "keys.0.requests_per_s", "greater"),
    ],
)
def test_what_cannot_work_together_or_at_all_is_rejected(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EndpointSpec.parse({"name": "m", **fields})
    assert caught.value.field == field


def test_haproxy_takes_as_many_networks_as_a_spec_may_have() -> None:
    networks = [f"2001:db8:ffff:ffff:ffff:ffff:{each:04x}:0/112" for each in range(50)]
    assert max(len(rule.split()) for rule in front._trust(networks)) <= 64


def test_an_address_that_cannot_be_had_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    def reject(**fields: object) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            check_address(ServingSpec.parse({"models": "m", "endpoint": fields}))
        assert caught.value.remedy
        return caught.value

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another HAProxy
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for field in ("port", "grpc_port"):
            error = reject(**{field: port})
            assert (error.field, error.value) == (f"endpoint.{field}", port)
            assert error.problem == "is in use at 127.0.0.1"
        assert reject(host="0.0.0.0", insecure=True, port=port).field == "endpoint.port"
    error = reject(host="192.0.2.1", insecure=True)
    assert (error.field, error.value) == ("endpoint.host", "192.0.2.1")
    files = Authority(tmp_path).sign()
    tls = {"certificate": files.certificate, "key": files.key}
    check_address(ServingSpec.parse({"models": "m", "endpoint": {"host": "::", "tls": tls}}))
    assert reject(tls={**tls, "key": str(tmp_path)}).field == "endpoint.tls.key"
    assert reject(tls={**tls, "client_ca": "/absent"}).field == "endpoint.tls.client_ca"


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_change_never_turns_a_number_that_is_none_into_nothing(number: str) -> None:
    sent = msgspec.json.decode(build_rollout_request({"options": {"deadline_s": float(number)}}).body)
    with pytest.raises(InferenceError, match=r"options.deadline_s = .*finite"):
        parse_options(sent["options"], {})
    sent = msgspec.json.decode(build_rollout_request({"options": {"pad_value": float(number)}}).body)
    assert str(parse_options(sent["options"], {})["pad_value"]) == number


SIMULATE = ["simulate", "--latency"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["deploy", "m", "--timeout-s", "nan"], "'--timeout-s': nan is not finite"),
        (["delete", "--timeout-s", "inf"], "'--timeout-s': inf is not finite"),
        (["canary", "m", "--percent", "nan"], "'--percent': nan is not finite"),
        (["shadow", "m", "--percent", "101"], "'--percent'"),
        (["status", "--interval-s", "inf"], "'--interval-s': inf is not finite"),
        (["deploy", "m", "--replicas", "1000000"], "'--replicas'"),
        (["deploy", "m", "endpoint.drain_s=.nan"], "endpoint.drain_s = nan"),
        ([*SIMULATE, "1:1,1:2"], "twice"),
        ([*SIMULATE, "1:0.1", "--rate", "inf"], "'--rate': inf is not finite"),
        ([*SIMULATE, "1:0.1", "--requests", "1000000000"], "'--requests'"),
    ],
)
def test_the_command_line_says_what_does_not_fit_and_exits_with_2(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        shoal.cli.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
