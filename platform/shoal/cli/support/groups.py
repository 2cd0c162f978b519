"""Groups of verbs that name the nearest one for a verb that there is not, and the signals that end a verb.

Light: every command loads it.
"""

from __future__ import annotations

import signal

import click

from shoal.errors import suggest


class SuggestingGroup(click.Group):
    """A group that names the nearest verb for one that there is not."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0]
        if not verb.startswith("-") and self.get_command(ctx, verb) is None and not ctx.resilient_parsing:
            ctx.fail(f"no such command {verb!r}. {suggest(verb, self.list_commands(ctx), most=3)}".rstrip(". "))
        return super().resolve_command(ctx, args)


def interrupt_on_termination() -> None:
    """Let SIGTERM, and except under `nohup` a closed terminal, end this program like Ctrl-C."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise_interrupt)


def _raise_interrupt(signum: int, frame: object) -> None:
    if signum == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # both the shell and the kernel send it
    raise KeyboardInterrupt
