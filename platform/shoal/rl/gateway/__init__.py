"""The gateway for external actors: socket, sessions, credit."""
