"""Replay: the newest experience in a bounded ring, drawn by priority. For algorithms that learn from it repeatedly."""
