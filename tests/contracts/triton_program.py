"""Every call of one stock client class against `triton_server`; run in the clients' own environment.

    .venv-clients/bin/python tests/contracts/triton_program.py {http,http_aio,grpc,grpc_aio} HTTP_PORT GRPC_PORT

Prints one JSON object: what failed, by the name of the check. A public method of the client that no check calls is a
failure too: a new version of it cannot bring one unnoticed.
"""

import inspect
import json
import sys
import traceback

import triton_checks
import triton_streams
import triton_trouble
from triton_clients import Client


def check_that_every_call_was_made(client):
    client.call("close")
    public = {
        name
        for name, member in inspect.getmembers(client.module.InferenceServerClient)
        if not name.startswith("_") and callable(member)
    }
    assert public - client.called == set(), (
        f"nobody called {sorted(public - client.called)}: check them, or refuse them"
    )


def main(kind, http_port, grpc_port):
    client = Client(kind, http_port, grpc_port)
    modules = (triton_checks, triton_trouble, triton_streams)
    checks = [check for module in modules for name, check in vars(module).items() if name.startswith("check_")]
    checks.append(check_that_every_call_was_made)
    failures = {}
    for check in checks:
        try:
            check(client)
        except Exception:  # noqa: BLE001  # whatever it is, it is reported, and the other checks are made
            failures[check.__name__] = traceback.format_exc(limit=-3)
    sys.stdout.write(json.dumps({"failures": failures, "num_checks": len(checks)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
