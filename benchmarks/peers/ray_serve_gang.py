"""A gang of Ray Serve's own: two replicas that start and end together, behind HAProxy as Serve ships it.

python -m benchmarks.peers.ray_serve_gang FOLDER

Serve sends requests to both ranks; each asks the other one for the answer. Ray is one of its own, with its files in
FOLDER. Says the address; ends when its input closes.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from benchmarks.talk import commands, say
from shoal.cluster.ingress.serve_environment import limit_replica_ports
from shoal.cluster.ports import find_free_port, reserve_port_block

NUM_RANKS = 2
PORTS = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")


class Rank:
    """One replica of the gang, whose answer needs the other one, as that of a model which they share would."""

    def __init__(self, folder: Path) -> None:
        from ray import serve

        gang = serve.get_replica_context().gang_context
        own, self._other = (folder / f"{gang.gang_id}-{rank}" for rank in (gang.rank, NUM_RANKS - 1 - gang.rank))
        self._listener: Any = Listener(("127.0.0.1", 0))
        self._connection: Any = None
        own.write_text(str(self._listener.address[1]))
        threading.Thread(target=self._echo, daemon=True).start()

    async def __call__(self) -> str:
        if self._connection is None:
            self._connection = Client(("127.0.0.1", int(self._other.read_text())))
        self._connection.send_bytes(b"answered")
        return str(self._connection.recv_bytes(), "ascii")

    def _echo(self) -> None:
        connection = self._listener.accept()
        with suppress(EOFError, OSError):  # the other one ends
            while True:
                connection.send_bytes(connection.recv_bytes())


def main(folder: Path, ports: range) -> None:
    files = {"CONFIG_FILE_LOC": "cfg", "SOCKET_PATH": "a", "METRICS_SOCKET_PATH": "m", "SERVER_STATE_FILE": "state"}
    os.environ |= {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()}
    os.environ |= {f"RAY_SERVE_{name}_PORT": str(find_free_port()) for name in PORTS} | limit_replica_ports(ports)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.urandom(32).hex(), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_HAPROXY_SERVER_STATE_BASE=str(folder))
    import ray
    from ray import serve
    from ray.serve.config import GangSchedulingConfig

    ray.init(num_cpus=4, _temp_dir=str(folder), _node_ip_address="127.0.0.1", include_dashboard=False)
    port = find_free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    gang = GangSchedulingConfig(gang_size=NUM_RANKS)
    options = {"num_replicas": NUM_RANKS, "ray_actor_options": {"num_cpus": 0.5}, "health_check_period_s": 2.0}
    serve.run(serve.deployment(Rank).options(gang_scheduling_config=gang, **options).bind(folder), name="gang")
    say(netloc=f"127.0.0.1:{port}")
    for _ in commands():
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    with reserve_port_block() as block:
        main(Path(sys.argv[1]), block)
