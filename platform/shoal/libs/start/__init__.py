"""Files to begin with: `shoal new`, `shoal client`, `shoal where`."""
