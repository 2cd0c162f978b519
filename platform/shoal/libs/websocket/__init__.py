"""WebSocket connections of a gateway, for games in engines and browsers."""
