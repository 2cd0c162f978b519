"""Passes requests from a replica's socket directly to the application, past the per-request work of Serve and uvicorn.

Serve's replica runs HTTP with uvicorn and makes two identifiers, a context, metrics and a slot for each request. The
application counts, refuses and answers by itself and needs none of it. It costs more than the inference of a small
model: half of the replica's CPU time for a request (decision 009). So `install_application` gives uvicorn a protocol
class that passes requests directly to the application and writes each answer at once. Serve's own paths, below `/-/`,
still go to Serve: health, and with it draining.

Called by the Ray shell before Serve starts the replica's HTTP server. uvicorn still handles parsing, bodies, pipelined
requests, keep-alive and shutdown. Serve no longer sees these requests: its count of ongoing requests stays at zero. An
endpoint that scales reports counts of its own (`scaling.replica_counts`).

The protocol class extends one of uvicorn's, whose internals may change with any version. Where they do not match,
`install_application` warns once and changes nothing: requests go through Serve and uvicorn, and gRPC is off.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from typing import Any

from shoal.serve.protocol.request_lifecycle import Application

logger = logging.getLogger(__name__)


def install_application(application: Application) -> bool:
    """Let HTTP servers that uvicorn starts in this process from now on pass requests to `application`.

    Returns False, with a warning and no change, when this version of uvicorn does not match.
    """
    direct, problem = _load_direct_protocol()
    if problem:
        logger.warning("requests go through Serve and uvicorn, and gRPC is off: %s", problem)
        return False
    direct.DirectProtocol.application = application
    importlib.import_module("uvicorn.config").HTTP_PROTOCOLS["auto"] = f"{direct.__name__}:DirectProtocol"
    return True


def _load_direct_protocol() -> tuple[Any, str]:
    """`direct_protocol`, and how uvicorn differs from what it needs; "" for a match."""
    try:
        protocols = importlib.import_module("uvicorn.config").HTTP_PROTOCOLS
        connection = importlib.import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
        source, direct = inspect.getsource(connection), importlib.import_module(f"{__package__}.direct_protocol")
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return None, f"uvicorn's HttpToolsProtocol is not there: {error}"
    if "auto" not in protocols:
        return None, "uvicorn has no protocol called auto"
    known = {name for each in inspect.getmro(connection) for name in _names(each)}
    if missing := sorted(direct.USED_OF_UVICORN - known):
        return None, f"uvicorn's HttpToolsProtocol has no {', '.join(missing)}"
    if unknown := sorted(set(re.findall(r"\bcycle\.(\w+)", source)) - set(dir(direct.DirectCycle))):
        return None, f"uvicorn's HttpToolsProtocol uses {', '.join(unknown)} of a request"
    return direct, ""


def _names(of: type) -> set[str]:
    """The names of methods and class attributes, and those that the methods use, instance attributes included."""
    functions = [each for each in vars(of).values() if inspect.isfunction(each)]
    return {*vars(of), *(name for each in functions for name in each.__code__.co_names)}
