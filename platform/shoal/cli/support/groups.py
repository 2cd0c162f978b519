"""Groups of verbs that name the nearest one for a verb that there is not. Light: every command loads it."""

from __future__ import annotations

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
