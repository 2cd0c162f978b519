"""`shoal console`: serve the pages."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path

import click

from shoal.errors import ClusterError, needs_extra
from shoal.home import load_access_token

DEFAULT_PORT = 8267


@click.command()
@click.option("--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at; 0.0.0.0: all of them.")
@click.option(
    "--name", "names", multiple=True, metavar="NAME", help="Another name of this host, by which browsers reach it."
)
@click.option("--open", "open_page", is_flag=True, help="Open a browser that is logged in.")
def console(port: int, host: str, names: tuple[str, ...], open_page: bool) -> None:
    """Show the runs, models, endpoints and the cluster in the browser, of this host and of SHOAL_STORE.

    On this host one may read without a token; changes need the access token of SHOAL_HOME, which the page asks for.
    At an address for other hosts, reading needs it too. Ctrl-C ends it.

    \b
    Examples:
      shoal console --open
      shoal console --host 0.0.0.0 --name gpu-7.lab --port 8267
    """
    with needs_extra("console"):
        from shoal.libs.console.server import bind, serve
    from shoal.libs.console.access import Access

    try:
        listening = bind(host, port)
    except OSError as error:
        remedy = "choose another --port, or 0 for a free one"
        raise ClusterError(f"the console cannot listen at {host}:{port}: {error.strerror}: {remedy}") from None
    address = listening.getsockname()
    is_local = ipaddress.ip_address(address[0]).is_loopback
    access = Access(
        load_access_token(), port=address[1], names=(f"[{host}]" if ":" in host else host, *names), readable=is_local
    )
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"http://{shown if is_local else (names or (shown,))[0]}:{address[1]}/"
    click.echo(f"The console: {url}   (Ctrl-C ends it)")
    if not is_local:
        click.echo(
            "Browsers send the token unencrypted there: use a network that you trust, a tunnel, or a proxy with TLS"
        )
    page = _write_login(url, access.make_code()) if open_page else None
    try:
        if page is not None:
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # uvicorn's, raised again
            if not webbrowser.open(page.as_uri()):
                click.echo("No browser was found here: open the address in one, and log in with the access token")
        serve(listening, access)
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
