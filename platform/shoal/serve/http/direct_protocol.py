"""uvicorn's protocol class of a connection, which passes requests directly to the application.

Owns the code that depends on uvicorn's internals: `fast_path.find_mismatch` compares them with
`fast_path.USED_OF_UVICORN` before uvicorn imports this module. Called by uvicorn alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.serve.http import fast_path
from shoal.serve.http.fast_path import DirectCycle


class DirectProtocol(HttpToolsProtocol):
    """One connection."""

    _unread: asyncio.TimerHandle | None = None

    def shutdown(self) -> None:
        """Called by uvicorn: close the connection once the requests in progress are answered."""
        super().shutdown()
        cycle: Any = self.cycle
        if isinstance(cycle, DirectCycle):
            cycle.announce_close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's timer keeps a reset connection in memory
        if self._unread is not None:
            self._unread.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open for the answer to a body that ends early. Any other end of input is a client that has gone: so is
        that of a gRPC stream, whose body has no length."""
        cycle: Any = self.cycle
        if not isinstance(cycle, DirectCycle) or not cycle.more_body or cycle.response_complete:
            return None
        if all(name != b"content-length" for name, _ in cycle.scope["headers"]):
            return None
        cycle.announce_incomplete()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle: Any = self.cycle
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            if self._unread is not None:
                self._unread.cancel()
            self._unread = self.loop.call_later(fast_path.UNREAD_BODY_TIMEOUT_S, self._leave, cycle)

    def _leave(self, cycle: object) -> None:
        """Abort the connection unless another request has begun. A client that sends single bytes would postpone
        uvicorn's timer."""
        if cycle is self.cycle:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        url = self.url
        application = fast_path.direct_application()
        if application is None and url.startswith(fast_path.GRPC_PATH_PREFIX):
            application = self.app
        if (
            application is None
            or url.startswith(fast_path.SERVE_PATH_PREFIX)
            or self.expect_100_continue
            or self.parser.should_upgrade()
        ):
            super().on_headers_complete()
            return
        path, _, query = url.partition(b"?")
        if b"%" in path or not path.startswith(b"/"):
            super().on_headers_complete()  # uvicorn splits such a path; the application gets it through Serve
            return
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["path"], scope["raw_path"], scope["query_string"] = path.decode("ascii"), path, query
        earlier = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        # It replaces uvicorn's own cycle: uvicorn reads and sets the same attributes.
        headers = self.server_state.default_headers
        cycle: Any = DirectCycle(scope, self.transport, self.flow, keep_alive, headers, self.on_response_complete)
        self.cycle = cycle
        if earlier is None or earlier.response_complete:
            task = self.loop.create_task(cycle.run_asgi(application))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, application))  # type: ignore[arg-type]
