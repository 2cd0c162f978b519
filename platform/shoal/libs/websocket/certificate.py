"""The certificate of a gateway's `wss` address; new content of its files counts for new connections."""

from __future__ import annotations

import os
import socket
import ssl

from shoal.errors import ConfigError


class ServerCertificate:
    """A certificate with its chain and its private key, in PEM. Raises ConfigError when they cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._seen = self._read_state()
        try:
            self._context = self._load()
        except (OSError, ValueError) as error:
            remedy = "give the certificate with its chain and its private key, in PEM, which the gateway may read"
            raise ConfigError("gateway.tls", list(self._files), f"cannot be used: {error}", remedy) from None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """A socket whose handshake happens when it is read. Raises OSError when the client has gone."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def refresh(self) -> None:
        """Load the files if they have changed; those that do not fit each other, as between two writes, later."""
        if (state := self._read_state()) != self._seen:
            self._seen = state
            try:
                self._context = self._load()
            except (OSError, ValueError):
                return  # it goes on with what it has

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password=lambda: "")  # an encrypted key must not ask at a terminal
        return context

    def _read_state(self) -> list[tuple[int, int, int] | None]:
        return [
            None if (it := _stat(path)) is None else (it.st_ino, it.st_mtime_ns, it.st_size) for path in self._files
        ]


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
