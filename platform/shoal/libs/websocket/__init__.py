"""WebSocket connections of a gateway, for games in engines and browsers."""

from shoal.plugins.library import Library

LIBRARY = Library(
    "websocket", extensions={"shoal.listeners": {"websocket": "shoal.libs.websocket.listener:WebSocketListener"}}
)
