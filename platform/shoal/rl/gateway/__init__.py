"""Where external actors connect: socket, sessions, credit."""
