"""A verb is a typed function: its parameters are what is typed, and its result is what is printed.

    @verb()
    def greet(
        names: Annotated[tuple[str, ...], "NAME..."],
        *,
        times: Annotated[int, click.IntRange(min=1), "How often."] = 1,
        key: Annotated[str, "--key KEY $GREET_KEY", "Of the door."] = "",
    ) -> Iterator[str]:

Positional parameters are arguments, keyword-only ones options. Their types and defaults say what they take: a tuple any
number, None nothing. Beside a type stand a text that names an argument's value in the help, or is the help of an
option; an option's spelling, value and variable, where they are others than its name's; and a type of click, or a
function that converts. A result is lines, or what rich draws; that of a verb with `show` is data, which `--json` prints
too. Groups of verbs have the verbs of libraries among their own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from rich.text import Text

from shoal.cli.support.console import Printed, make_literal_console, print_json
from shoal.cli.support.groups import SuggestingGroup, interrupt_on_termination
from shoal.errors import RunError, suggest
from shoal.plugins.find import load_reference
from shoal.plugins.library import find_libraries

Function = Callable[..., Any]
JSON_HELP = "Print JSON, for programs."
AsJson = Annotated[bool, "--json", JSON_HELP]


def verb(
    name: str | None = None,
    *,
    show: Function | None = None,
    to_json: Function | None = None,
    work: str = "",
    cls: type[click.Command] = click.Command,
    **settings: Any,
) -> Callable[[Function], click.Command]:
    """A command of click's that is a typed function.

    show:    makes of the result what is printed; the verb then has `--json`. Without it the result is printed
    to_json: makes of the result what `--json` prints; without it that is the result
    work:    what it does, which is said on stderr now and then while it lasts (`shoal.runs.waits`); SIGTERM ends it as
             Ctrl-C does
    """

    def make(function: Function) -> click.Command:
        hints = get_type_hints(function, include_extras=True)
        parameters = [
            _make_parameter(each, hints[name]) for name, each in inspect.signature(function).parameters.items()
        ]
        asks_json = "as_json" in hints
        if show is not None and not asks_json:
            parameters.append(click.Option(["--json", "as_json"], is_flag=True, help=JSON_HELP))

        @functools.wraps(function)
        def call(**given: Any) -> None:
            as_json = given["as_json"] if asks_json else given.pop("as_json", False)
            with ExitStack() as waiting:
                if work:
                    from shoal.runs.waits import WaitReporter  # here: other verbs need no runs

                    interrupt_on_termination()
                    waiting.enter_context(WaitReporter(work))
                result = function(**given)
                if as_json and show is not None:
                    print_json(result if to_json is None else to_json(result))
                else:
                    print_result(result if show is None else show(result))
                if isinstance(result, Printed):
                    paths = [f"  {path}" for path in result.write()]
                    print_result([] if as_json else paths)

        return click.command(name, cls=cls, params=parameters, **settings)(call)

    return make


def print_result(shown: object) -> None:
    """Print lines, and what rich draws, each as it comes; nothing for None."""
    if isinstance(shown, str):
        click.echo(shown)
    elif isinstance(shown, Iterable):
        for each in shown:
            print_result(each)
    elif shown is not None:
        make_literal_console(soft_wrap=isinstance(shown, Text)).print(shown)


def _make_parameter(parameter: inspect.Parameter, annotation: Any) -> click.Parameter:
    attributes, default = _read_type(annotation), parameter.default
    texts: list[str] = attributes.pop("texts", [])
    attributes["required"] = default is parameter.empty
    if default not in (None, (), parameter.empty):
        attributes["default"] = default
    if parameter.kind is not parameter.KEYWORD_ONLY:
        attributes["nargs"] = -1 if attributes.pop("multiple", False) else 1
        return click.Argument([parameter.name], metavar=texts[-1] if texts else None, **attributes)
    spelling = next((each.split() for each in texts if each.startswith("--")), [])
    names = [each for each in spelling if each.startswith("--")] or [f"--{parameter.name.replace('_', '-')}"]
    return click.Option(
        [*names, parameter.name],
        metavar=next((each for each in spelling if not each.startswith(("--", "$"))), None),
        envvar=[each.removeprefix("$") for each in spelling if each.startswith("$")],
        help=next((each for each in reversed(texts) if not each.startswith("--")), None),
        show_default=default != "",
        **attributes,
    )


def _read_type(annotation: Any) -> dict[str, Any]:
    """A parameter's type, in the attributes of click, and the texts beside it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        attributes = _read_type(arguments[0])
        for each in arguments[1:]:
            if isinstance(each, str):
                attributes.setdefault("texts", []).append(each)
            else:
                attributes["type"] = each
        return attributes
    if origin in (Union, UnionType):  # with None
        return _read_type(arguments[0])
    if origin is tuple:
        return {**_read_type(arguments[0]), "multiple": True}
    if origin is Literal:
        return {"type": click.Choice(arguments)}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": click.Path(path_type=Path) if annotation is Path else annotation}


class CommandGroup(SuggestingGroup):
    """A group with a list of full sentences, which click would cut at the line's end; libraries join it with verbs such
    as "models push", which are imported when they are used."""

    def verb(self, name: str | None = None, **settings: Any) -> Callable[[Function], click.Command]:
        """A verb of this group."""

        def add(function: Function) -> click.Command:
            command = verb(name, **settings)(function)
            self.add_command(command)
            return command

        return add

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._find_verbs()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (found := self._find_verbs().get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = load_reference(found[0])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [(name, each.get_short_help_str(limit=1_000)) for name, each in self.commands.items()]
        theirs = [(name, text) for name, (_, text) in self._find_verbs().items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted([*own, *theirs]))

    def _find_verbs(self) -> dict[str, tuple[str, str]]:
        each = [item for library in find_libraries() for item in library.verbs.items()]
        return {verb.removeprefix(f"{self.name} "): found for verb, found in each if verb.startswith(f"{self.name} ")}


class DefaultCommandGroup(CommandGroup):
    """A group with a command `default` for words that begin with no command's name."""

    default = "show"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_own = bool(args) and args[0] in (*self.list_commands(ctx), *ctx.help_option_names)
        ctx.obj = "" if is_own or not args else suggest(args[0], self.list_commands(ctx))
        return super().parse_args(ctx, args if is_own else [self.default, *args])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except RunError as error:
            if not ctx.obj:
                raise
            raise RunError(f"{error}. Of the verbs, {ctx.obj}") from None  # neither a run nor a verb
