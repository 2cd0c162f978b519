"""The command line: parse, call, print. One module per command; each is loaded only when used."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import click

from shoal import __version__
from shoal.cli.support.groups import SuggestingGroup
from shoal.errors import ConfigError, InferenceError, NotReached, ShoalError
from shoal.plugins.library import LIBRARIES, find_libraries
from shoal.recipes import find_packaged

HEADINGS = ("begin", "train", "play", "serve", "look", "operate")  # of `shoal --help`
# command -> (module, heading, help text); `find_commands` adds those of libraries
COMMANDS = {
    "run": ("run", "begin", "Run a job, with a live display."),
    "actor": ("actor", "play", "Play an environment and send the experience to a gateway."),
    "set": ("runs:set_settings", "play", "Change the settings of a run's games."),
    "models": ("models", "serve", "List, show, add, promote, roll back and remove registered models."),
    "serve": ("serve", "serve", "Serve models: deploy, show, roll out, roll back, delete."),
    "runs": ("runs", "look", "List the runs, show one, or remove some."),
    "logs": ("runs", "look", "Show what the processes of a run printed."),
    "status": ("cluster", "look", "Show what is running: the cluster, its jobs, gateways and endpoints."),
    "up": ("cluster", "operate", "Start a Ray cluster for Shoal on this machine, in the background."),
    "down": ("cluster", "operate", "Stop the cluster that `shoal up` started."),
    "release": ("runs", "operate", "Release an actor of a run from quarantine."),
}


def find_commands() -> dict[str, tuple[str, str, str]]:
    """The `module:command`, the heading and the help text of each verb, but for those within a group of ours.

    Raises ConfigError where two have one verb.
    """
    commands = {}
    for verb, (place, heading, text) in COMMANDS.items():
        commands[verb] = (f"shoal.cli.commands.{place}" + ("" if ":" in place else f":{verb}"), heading, text)
    owners = dict.fromkeys(commands, "shoal")
    for library in find_libraries():
        verbs = {
            verb: (place, library.heading, text) for verb, (place, text) in library.verbs.items() if " " not in verb
        }
        if twice := owners.keys() & verbs.keys():
            verb = min(twice)
            problem = f"has the verb {verb}, which {owners[verb]} has too"
            raise ConfigError(LIBRARIES, library.name, problem, "uninstall one of the packages")
        commands |= verbs
        owners |= dict.fromkeys(verbs, library.name)
    return commands


class _LazyCommandGroup(SuggestingGroup):
    """A group that imports a command's module when the command is used, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(find_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (entry := find_commands().get(cmd_name)) is None:
            return None
        module, _, name = entry[0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before the command began, or in one that has nothing to save
            ctx.exit(128 + signal.SIGINT)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = find_commands()
        for shown in HEADINGS:
            with formatter.section(shown.capitalize()):
                formatter.write_dl(
                    [
                        (verb, text)
                        for verb, (_, heading, text) in commands.items()
                        if shown == (heading if heading in HEADINGS else "operate")
                    ]
                )


def _print_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"shoal {__version__}, commit {_find_commit()}")
        context.exit()


def _find_commit() -> str:
    """The commit that this package was built of, or that the checkout has, where that is known."""
    recorded = find_packaged("commit.txt")
    if recorded.is_file():
        return recorded.read_text()
    from shoal.runs.record.provenance import git_revision  # with pydantic, which `shoal --help` does without

    revision, is_dirty = git_revision(recorded.parent)
    return revision[:10] + " (changed)" * is_dirty if revision else "unknown"


@click.group(
    cls=_LazyCommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Pages that are named, docs/..., are in a clone and in the source distribution.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and its commit.",
)
def cli() -> None:
    """Shoal trains, reinforces and serves PyTorch models on Ray as one loop of versioned weights."""


def main() -> None:
    """The `shoal` program: prints a ShoalError or a system error as one line, and exits with status 1, or with 2 where
    what the user gave does not fit, or 3 where a run has missed its target."""
    try:
        cli.main(standalone_mode=True)
    except (ShoalError, OSError) as error:
        if isinstance(error, NotReached):
            click.secho(str(error), fg="yellow", err=True)
            sys.exit(NotReached.EXIT_STATUS)
        click.secho(f"error: {format_os_error(error) if isinstance(error, OSError) else error}", fg="red", err=True)
        is_refused = isinstance(error, ConfigError) or (isinstance(error, InferenceError) and error.status == 400)
        sys.exit(2 if is_refused else 1)


def format_os_error(error: OSError) -> str:
    """The system's error and its place: `/a/b: Permission denied`; of our own errors the message."""
    if isinstance(error, ShoalError) or not error.strerror:
        return str(error) or type(error).__name__
    places = [os.fsdecode(place) for place in (error.filename, error.filename2) if isinstance(place, str | bytes)]
    return f"{' and '.join(places)}: {error.strerror}" if places else error.strerror
