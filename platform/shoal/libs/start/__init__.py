"""Files to begin with: `shoal new`."""
