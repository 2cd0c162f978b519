"""Ways of computing many members of one architecture: each an engine, of which a trial chooses the fastest."""
