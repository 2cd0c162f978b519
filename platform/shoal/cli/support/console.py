"""The console of verbs that print names, paths and words of others: `[a]` and `:b:` stand there as they were written.

Called by the verbs. Pictures style what they assemble (`rich.text.Text`), and never by markup in a string.
"""

from __future__ import annotations

from rich.console import Console


def literal_console(*, soft_wrap: bool = True) -> Console:
    """Takes no string for markup or an emoji, nor the heading of a table. `soft_wrap`: long lines stay whole."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)
