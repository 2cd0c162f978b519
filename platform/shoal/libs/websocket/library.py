"""The listener that this library adds to gateways."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "websocket", extensions={"shoal.listeners": {"websocket": "shoal.libs.websocket.listener:WebSocketListener"}}
)
