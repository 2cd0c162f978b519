"""Follows HAProxy, and has a replica answer clients at its port whenever there is nothing to balance.

HAProxy marks the only replica of the only endpoint whenever it starts (`haproxy_config.find_only_replica`), which is
whenever replicas or endpoints change. The replica takes a duplicate of HAProxy's listening sockets, and then pauses
HAProxy's front. Where the mark is gone, a new HAProxy accepts connections at the same sockets already. Both may accept
at once, so neither change loses a connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.cluster.ingress.connection_guard import ConnectionGuard
from shoal.cluster.ingress.shared_listener import Mark, is_running, pause_front, read_mark, take_listeners
from shoal.network_address import is_loopback
from shoal.serve.http.front_protocol import DirectFront

logger = logging.getLogger(__name__)
POLL_S = 0.1


class FrontFollower:
    """Follows the mark of the HAProxy whose configuration is in `folder`.

    server:      uvicorn's, at `port` of `hosts`
    answer_s:    see `DirectFront`
    """

    def __init__(self, server: Any, hosts: Collection[str], port: int, folder: Path, answer_s: float) -> None:
        self._server = server
        self._hosts = hosts
        self._port = port
        self._folder = folder
        self._answer_s = answer_s
        self._mark: Mark | None = None
        self._front: DirectFront | None = None
        self._listeners: dict[int, socket.socket] = {}  # by their sockets' inodes

    async def run(self) -> None:
        """Returns when the server stops."""
        while not self._server.should_exit:
            try:
                await self._follow(read_mark(self._folder))
            except OSError as error:  # HAProxy ends or starts: see again
                logger.debug("HAProxy's sockets cannot be had: %s", error)
            await asyncio.sleep(POLL_S)
        if self._front is not None:
            with suppress(OSError):  # the guard does it again when this process has ended
                await self._leave(read_mark(self._folder))
            self._close_listeners()
            self._front.close()

    async def _follow(self, mark: Mark | None) -> None:
        is_ours = mark is not None and self._names_us(mark)
        is_guarded = self._front is None or self._front.guard.is_alive
        if self._listeners and not (is_ours and is_guarded):
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
            self._front = DirectFront(self._server, ConnectionGuard(self._folder, mark.server), self._answer_s)
        self._front.is_leaving = False
        for each in await asyncio.to_thread(take_listeners, self._folder, mark.port):
            inode = os.fstat(each.fileno()).st_ino
            if inode in self._listeners:  # HAProxy has it from the one before
                each.close()
            else:
                self._listeners[inode] = each
                self._front.listen(each)
        if self._listeners:
            await asyncio.to_thread(pause_front, self._folder, True)
        self._mark = mark

    async def _leave(self, mark: Mark | None) -> None:
        """Leave the connections to HAProxy. mark: the present one"""
        assert self._front is not None
        self._front.is_leaving = True
        if mark is None or self._names_us(mark):  # or another replica has paused the front
            await asyncio.to_thread(pause_front, self._folder, False)
        self._mark = None
        self._close_listeners()

    def _close_listeners(self) -> None:
        assert self._front is not None
        while self._listeners:
            self._front.stop_listening(self._listeners.popitem()[1])
