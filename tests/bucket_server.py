"""An S3 server for tests: moto's, which honours conditional writes, on a free port of the loopback.

python bucket_server.py ADDRESS     says the environment of its users, as JSON, and serves until its input ends
"""

import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from shoal.store import Store, location, open_store

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_REGION": "us-east-1",
    "SHOAL_STORE_TIMEOUT_S": "0",  # a test of an outage gives more
}
BUCKET = "shoal-tests"
_numbers = itertools.count()
_running: dict[str, ThreadedMotoServer] = {}


_PUT, _PUTTING = S3Response.put_object, threading.Lock()


def _put_atomically(response: S3Response) -> Any:
    """As S3 does: moto checks a condition and writes in two steps, between which another thread may write."""
    with _PUTTING:
        return _PUT(response)


@contextmanager
def running_bucket(host: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """The environment of those who use the bucket `s3://shoal-tests`, empty at first."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    S3Response.put_object = _put_atomically  # type: ignore[method-assign]
    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    try:
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing-secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=url, **keys)
        client.create_bucket(Bucket=BUCKET)
        _running[url] = server
        yield ENVIRONMENT | {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
    finally:
        _running.pop(url, server).stop()


class Outage:
    """The server of this environment is away from now on, until `end`. Its objects stay."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._url = environment["AWS_ENDPOINT_URL"]
        self._server = _running[self._url]
        self._server.stop()

    def end(self) -> None:
        """Idempotent."""
        if _running[self._url] is self._server:
            address, _, port = self._url.removeprefix("http://").partition(":")
            _running[self._url] = ThreadedMotoServer(ip_address=address, port=int(port), verbose=False)
            _running[self._url].start()


@pytest.fixture(scope="module")
def bucket_environment() -> Iterator[dict[str, str]]:
    with running_bucket() as environment:
        yield environment
    location._open_bucket.cache_clear()  # the next server has another port


def open_bucket(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store below a prefix of its own, within the test's reach from now on. environment: `bucket_environment`"""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}/a b")


def open_kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of the kind that the fixture's parameter names: `folder` or `bucket`."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    return open_bucket(request.getfixturevalue("bucket_environment"), monkeypatch)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return open_kind(request, tmp_path, monkeypatch)


if __name__ == "__main__":
    with running_bucket(sys.argv[1]) as found:
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
        sys.stdin.read()
