"""`shoal console`: serve the pages."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import webbrowser
from html import escape
from pathlib import Path
from typing import Annotated, Any

import click

from shoal.errors import needs_extra
from shoal.extend.cli import Texts, verb
from shoal.libs.console.job import DEFAULT_PORT, ConsoleSpec, listen


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
