"""Where a console listens, by which names and with which certificate: `shoal console`, and a job of a cluster.

Both open the same console. The job's record has its address, which `shoal status` shows.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import tempfile
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field, ValidationInfo, field_validator

from shoal.config import Spec
from shoal.errors import ClusterError, ConfigError, needs_extra
from shoal.extend.cli import Texts, verb
from shoal.extend.cluster import find_dashboard_url
from shoal.home import load_access_token
from shoal.libs.console.access import Access
from shoal.network_address import WILDCARDS, is_loopback
from shoal.runs import RunRecorder

DEFAULT_PORT = 8267
KIND = "console"


class ConsoleTls(Spec):
    """The files of the console's certificate, on its host, in PEM. New content counts for new connections.

    certificate: with its chain
    key:         its private key
    """

    certificate: str = Field(min_length=1)
    key: str = Field(min_length=1)


class ConsoleSpec(Spec):
    """A console that is a job of a cluster.

    host:     where it listens, on the job's host; beyond loopback with `tls`, or `insecure`
    port:     0: any free one
    names:    further names of this host, by which browsers reach it
    tls:      for https
    insecure: accept plain HTTP beyond loopback: others read the pages, and the token of a login
    """

    tls: ConsoleTls | None = None
    insecure: bool = False
    host: str = "127.0.0.1"  # after these, which its validation needs
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    names: tuple[str, ...] = ()

    @field_validator("host")
    @classmethod
    def _require_encryption(cls, host: str, info: ValidationInfo) -> str:
        if not (is_loopback(host) or info.data.get("tls", True) or info.data.get("insecure", True)):
            problem = "is beyond loopback, where plain HTTP shows every page, and the token of a login"
            raise ValueError(f"{problem}: give a certificate and its key, or insecure")
        return host


@dataclass(frozen=True)
class Listening:
    """A console that listens, before it answers."""

    socket: socket.socket
    access: Access
    url: str
    context: ssl.SSLContext | None


def listen(spec: ConsoleSpec) -> Listening:
    """Raises ClusterError for an address that is taken or not this host's, ConfigError for a certificate."""
    from shoal.libs.console.server import bind

    context = None if spec.tls is None else make_context(spec.tls)
    try:
        opened = bind(spec.host, spec.port)
    except OSError as error:
        remedy = "choose another port, or 0 for a free one"
        raise ClusterError(f"the console cannot listen: {error.strerror}: {remedy}") from None
    own, port = opened.getsockname()[:2]
    is_local, host = is_loopback(own), f"[{spec.host}]" if ":" in spec.host else spec.host
    names = (*spec.names, *((socket.gethostname(),) if spec.host in WILDCARDS else (host,)))
    access = Access(load_access_token(), port=port, names=(*names, host), readable=is_local, is_tls=context is not None)
    shown = f"[{own}]" if ":" in own else own
    url = f"{'https' if context else 'http'}://{shown if is_local else names[0]}:{port}/"
    return Listening(opened, access, url, context)


def make_context(tls: ConsoleTls) -> ssl.SSLContext:
    """TLS with this certificate, which each handshake loads again if the files have changed.

    Raises ConfigError for files that cannot be used; later ones, as between two writes, wait for the next handshake.
    """

    newest: dict[str, Any] = {}

    def load() -> ssl.SSLContext:
        loaded, times = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), _read_times(tls)
        loaded.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # an encrypted key must not ask
        newest.update(times=times, context=loaded)
        return loaded

    def refresh(opened: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        with suppress(OSError, ValueError):
            if _read_times(tls) != newest["times"]:
                load()
        opened.context = newest["context"]

    try:
        first = load()
    except (OSError, ValueError) as error:
        remedy = "give the certificate with its chain and its private key, in PEM, which the console may read"
        raise ConfigError("tls", [tls.certificate, tls.key], f"cannot be used: {error}", remedy) from None
    first.sni_callback = refresh
    return first


def _read_times(tls: ConsoleTls) -> list[int]:
    return [Path(each).stat().st_mtime_ns for each in (tls.certificate, tls.key)]


def run_console(spec: ConsoleSpec, recorder: RunRecorder) -> None:
    """Answer until the job is stopped. Raises as `listen`."""
    with needs_extra("console"):
        from shoal.libs.console.server import serve

    opened = listen(spec)
    if (dashboard := find_dashboard_url()) is not None:  # of this job's cluster: the page Cluster asks it
        os.environ.setdefault("RAY_API_SERVER_ADDRESS", dashboard)
    recorder.record_endpoint(KIND, KIND, opened.url, "ready")
    host, port = socket.gethostname(), opened.socket.getsockname()[1]
    click.echo(f"The console: {opened.url}   on {host}")
    if is_loopback(spec.host):
        click.echo(f"From another machine: ssh -N -L {port}:127.0.0.1:{port} {host}   and open that address")
    try:
        serve(opened.socket, opened.access, opened.context)
    finally:
        recorder.record_endpoint(KIND, KIND, opened.url, "closed")


@verb()
def console(
    *,
    port: Annotated[int, click.IntRange(0, 65535), "0: any free one."] = DEFAULT_PORT,
    host: Annotated[str, "The address to listen at; 0.0.0.0: all of them."] = "127.0.0.1",
    names: Annotated[Texts, "--name NAME", "Another name of this host, by which browsers reach it."] = (),
    certificate: Annotated[
        str | None, "--certificate PATH", "For https: a PEM file with its chain. Needs --key."
    ] = None,
    key: Annotated[str | None, "--key PATH", "Its private key, in PEM."] = None,
    insecure: Annotated[bool, "Accept plain HTTP beyond loopback, as behind a proxy with TLS."] = False,
    open_page: Annotated[bool, "--open", "Open a browser that is logged in."] = False,
) -> None:
    """Show the runs, models, endpoints and the cluster in the browser, of this host and of SHOAL_STORE.

    On this host one may read without a token; changes need the access token of SHOAL_HOME, which the page asks for.
    At an address for other hosts, reading needs it too. Ctrl-C ends it. `shoal run console` runs it on a cluster.

    \b
    Examples:
      shoal console --open
      shoal console --host 0.0.0.0 --name gpu-7.lab --certificate /etc/web.pem --key /etc/web.key
    """
    with needs_extra("console"):
        from shoal.libs.console.server import serve

    files = {name: value for name, value in (("certificate", certificate), ("key", key)) if value}
    given: dict[str, Any] = {"host": host, "port": port, "names": names, "insecure": insecure}
    opened = listen(ConsoleSpec.parse({**given, **({"tls": files} if files else {})}))
    click.echo(f"The console: {opened.url}   (Ctrl-C ends it)")
    page = _write_login(opened.url, opened.access.make_code()) if open_page else None
    try:
        if page is not None:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # uvicorn's, raised again
            if not webbrowser.open(page.as_uri()):
                click.echo("No browser was found here: open the address in one, and log in with the access token")
        serve(opened.socket, opened.access, opened.context)
    finally:
        if page is not None:
            page.unlink(missing_ok=True)


def _write_login(url: str, code: str) -> Path:
    """A page that only its owner can read, and that sends a code in a form: it is in no URL and no argument list."""
    descriptor, name = tempfile.mkstemp(prefix="shoal-console-", suffix=".html")
    with os.fdopen(descriptor, "w") as file:
        file.write(
            f'<!doctype html><title>Shoal</title><form method="post" action="{escape(url)}login">'
            f'<input type="hidden" name="token" value="{escape(code)}"><button>Open the console</button></form>'
            "<script>document.forms[0].submit()</script>"
        )
    return Path(name)
