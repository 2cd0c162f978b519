"""Has an endpoint's only replica answer clients at the ingress's own port, without HAProxy between them.

HAProxy marks such a replica whenever it starts (`haproxy_config.find_only_replica`), and it starts whenever replicas or
applications change. The replica follows the mark: it takes a duplicate of HAProxy's listening sockets, and then pauses
HAProxy's front. Where the mark is gone, a new HAProxy accepts connections at the same sockets already. Both may accept
at once, so neither the one nor the other change can lose a connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import replica

from shoal.cluster.capacity import get_head_id
from shoal.cluster.ingress.connection_guard import ConnectionGuard
from shoal.cluster.ingress.serve_environment import BINARY_VARIABLE, find_ingress_folder
from shoal.cluster.ingress.shared_listener import Mark, is_running, pause_front, read_mark, take_listeners
from shoal.network_address import is_loopback
from shoal.serve.http.front_protocol import Front
from shoal.serve.on_ray.bind_address import is_head

logger = logging.getLogger(__name__)
POLL_S = 0.1


def answer_clients(answer_s: float) -> None:
    """Follow this node's ingress with the HTTP server that Serve starts next in this process."""
    if BINARY_VARIABLE not in os.environ or sys.platform != "linux":
        return
    start, node = replica.start_asgi_http_server, ray.util.get_node_ip_address()
    folder = find_ingress_folder() / (get_head_id() if is_head(node) else ray.get_runtime_context().get_node_id())

    async def start_and_follow(app: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        task, server = await start(app, options, *args, **kwargs)
        follower = FrontFollower(server, {options.host, node}, options.port, folder, answer_s)
        server.following = asyncio.get_running_loop().create_task(follower.run())
        return task, server

    replica.start_asgi_http_server = start_and_follow


class FrontFollower:
    """Follows the mark of the HAProxy whose configuration is in `folder`.

    server:      uvicorn's, at `port` of `hosts`
    answer_s:    see `Front`
    """

    def __init__(self, server: Any, hosts: set[str], port: int, folder: Path, answer_s: float) -> None:
        self._server, self._hosts, self._port, self._folder = server, hosts, port, folder
        self._answer_s = answer_s
        self._mark: Mark | None = None
        self._front: Front | None = None
        self._listeners: dict[int, asyncio.Server] = {}  # by their sockets' inodes

    async def run(self) -> None:
        """Returns when the server stops."""
        while not self._server.should_exit:
            try:
                await self._follow(read_mark(self._folder))
            except OSError as error:  # HAProxy ends or starts: see again
                logger.debug("HAProxy's sockets cannot be had: %s", error)
            await asyncio.sleep(POLL_S)
        if self._mark is not None:
            await self._leave(self._mark)
        if self._front is not None:
            self._front.close()

    async def _follow(self, mark: Mark | None) -> None:
        is_ours = mark is not None and self._names_us(mark)
        is_guarded = self._front is None or self._front.guard.is_alive
        if self._mark is not None and not (is_ours and is_guarded):
            await self._leave(mark)
        elif mark is not None and mark != self._mark and is_ours and is_guarded:
            await self._enter(mark)

    def _names_us(self, mark: Mark) -> bool:
        host, _, port = mark.server.rpartition(":")
        return int(port) == self._port and (is_loopback(host) or host in self._hosts)

    async def _enter(self, mark: Mark) -> None:
        """Accept connections at the sockets of the HAProxy of a mark, in place of it."""
        if not await asyncio.to_thread(is_running, mark, self._folder):
            return
        if self._front is None:
            self._front = Front(self._server, ConnectionGuard(self._folder, mark.server), self._answer_s)
        self._front.is_leaving = False
        loop = asyncio.get_running_loop()
        for each in await asyncio.to_thread(take_listeners, self._folder, mark.port):
            inode = os.fstat(each.fileno()).st_ino
            if inode in self._listeners:  # HAProxy has it from the one before
                each.close()
            else:
                backlog = self._server.config.backlog
                self._listeners[inode] = await loop.create_server(self._front.make_protocol, sock=each, backlog=backlog)
        if self._listeners:
            await asyncio.to_thread(pause_front, self._folder, True)
            self._mark = mark

    async def _leave(self, mark: Mark | None) -> None:
        """Leave the connections to HAProxy. mark: the present one"""
        assert self._front is not None
        self._mark = None
        self._front.leave()
        try:
            if mark is None or self._names_us(mark):  # or another replica has paused the front
                await asyncio.to_thread(pause_front, self._folder, False)
        finally:
            for each in self._listeners.values():
                each.close()
            self._listeners = {}
