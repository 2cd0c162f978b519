"""Where messages come from: a broker, files; and what they have in common."""
