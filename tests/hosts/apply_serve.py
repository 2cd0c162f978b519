"""Gives Serve a configuration as KubeRay does, and waits for its applications: `apply_serve.py URL TOKEN JSON`."""

import json
import sys
import time

import httpx2

LIMIT_S = 600.0


def main(url: str, token: str, content: str) -> None:
    headers = {"x-ray-authorization": f"Bearer {token}"}
    httpx2.put(url, json=json.loads(content), headers=headers, timeout=60).raise_for_status()
    states: dict[str, str] = {}
    until_s = time.monotonic() + LIMIT_S
    while not states or set(states.values()) != {"RUNNING"}:
        details = httpx2.get(url, headers=headers, timeout=60).raise_for_status().json()
        states = {name: each["status"] for name, each in details["applications"].items()}
        assert "DEPLOY_FAILED" not in states.values(), details["applications"]
        assert time.monotonic() < until_s, details["applications"]
        time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
