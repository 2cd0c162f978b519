"""moto's S3 server in a process of its own, with one bucket; says its URL.

python -m benchmarks.ours.bucket BUCKET

It keeps what it has read of an object: moto would read all of it again for each range.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

import boto3
from moto.s3.models import FakeKey
from moto.server import ThreadedMotoServer

from benchmarks.talk import commands, say


def main(bucket: str) -> None:
    read, write = FakeKey.value.fget, FakeKey.value.fset
    FakeKey.value = property(cache(read), write)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address, port = server.get_host_and_port()
    url = f"http://{address}:{port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=bucket)
    say(url=url)
    for _ in commands():
        """Until the parent closes the pipe."""
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
