"""`shoal chat`: a conversation with a language model in the terminal; of texts in a pipe, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from shoal.client import Client, StreamedText
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import ConfigError, ShoalError, suggest
from shoal.extend.cli import FiniteRange, ca_option
from shoal.extend.registry import LocalModel, Registry, find_version, split_ref

Ask = Callable[[list[dict[str, str]]], StreamedText]
HELP = {
    "/system TEXT": "set what the model shall be; without TEXT, show it",
    "/version": "show which version wrote each token of the last answer",
    "/save FILE": "append the conversation as a line of JSON, from which `shoal run finetune data=FILE` learns",
    "/reset": "begin the conversation again",
    "/help": "show this",
    "/quit": "leave; Ctrl-D, too. Ctrl-C cancels an answer",
    '"""': "begin a text of several lines, which ends with the same; what is pasted may have them anyway",
}
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})  # a model must not steer the terminal


@click.command()
@click.argument("model", metavar="NAME[@VERSION]")
@click.option("--system", default="", metavar="TEXT", help="What the model shall be.")
@click.option("--temperature", type=FiniteRange(min=0), help="0 takes the likeliest token.  [default: 1]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Of an answer.")
@click.option("--seed", type=int, help="The same answers again.")
@click.option(
    "--endpoint", metavar="NAME|URL", help="Ask an endpoint.  [default: the model's weights, in this process]"
)
@ca_option
@click.option("--key", envvar="SHOAL_KEY", default="", metavar="KEY", help="An API key, or $SHOAL_KEY.")
def chat(
    model: str,
    system: str,
    temperature: float | None,
    max_tokens: int,
    seed: int | None,
    endpoint: str | None,
    key: str,
) -> None:
    """Talk with a language model: one of the registry, in this process, or one of an endpoint.

    An answer is shown while it is written; Ctrl-C cancels it. /help shows what else there is. A text in a pipe is
    answered once. NAME is the newest version, or the one that an endpoint chooses.

    \b
    Examples:
      shoal chat smollm@champion
      shoal chat smollm --system "Answer in one sentence." --temperature 0.7
      echo "What is a shoal?" | shoal chat smollm --max-tokens 60
      shoal chat smollm --endpoint https://models.example:8000 --key MY-KEY
    """
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with ExitStack() as stack:
        ask = _open_local(model, fields) if endpoint is None else _open_endpoint(model, endpoint, key, fields, stack)
        talk = Conversation(ask, system)
        if not sys.stdin.isatty():
            if not (text := sys.stdin.read().strip()):
                raise ConfigError("stdin", "", "has no text", "echo TEXT | shoal chat NAME")
            talk.answer(text)
            return
        where = "in this process" if endpoint is None else f"at {endpoint}"
        click.secho(f"{model} {where}; /help shows what else there is", dim=True, err=True)
        with suppress(EOFError):
            while _take(talk, _read_text()):
                pass


def _open_local(model: str, fields: dict[str, Any]) -> Ask:
    local = LocalModel(find_version(model))
    _require_chat(local.has_chat, f"{local.name}@{local.version}")
    return lambda messages: local.chat(messages, **fields)


def _open_endpoint(model: str, endpoint: str, key: str, fields: dict[str, Any], stack: ExitStack) -> Ask:
    name, version = split_ref(model)
    if version and not version.isdigit():
        model = f"{name}@{Registry().get(model).version}"
    target = find_endpoint(endpoint)
    client = stack.enter_context(Client(target.url, token=key or token_for(target.url)))
    _require_chat(client.has_chat(name), name)
    return lambda messages: client.chat(model, messages, **fields)


def _require_chat(has_chat: bool, model: str) -> None:
    if not has_chat:
        problem = "has no chat template: it continues texts, and holds no conversation"
        raise ConfigError("model", model, problem, f"`shoal predict {model} --text TEXT` continues one, at an endpoint")


class Conversation:
    """Messages so far. `last`: the newest answer."""

    def __init__(self, ask: Ask, system: str = "") -> None:
        self._ask, self.system = ask, system
        self.messages: list[dict[str, str]] = []
        self.last: StreamedText | None = None

    def list_messages(self) -> list[dict[str, str]]:
        """With the system's, where there is one."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.messages

    def answer(self, text: str) -> None:
        """Write the answer to a message as it comes. A message that gets none is forgotten. Raises what `Client.chat`
        does, KeyboardInterrupt."""
        self.messages.append({"role": "user", "content": text})
        self.last = None
        try:
            with self._ask(self.list_messages()) as self.last:
                for part in self.last:
                    click.echo(part.translate(_CONTROLS) if sys.stdout.isatty() else part, nl=False)
        finally:
            if self.last is None or not self.last.text:
                self.messages.pop()
            else:
                click.echo()
                self.messages.append({"role": "assistant", "content": self.last.text})

    def describe_versions(self) -> str:
        """Which version wrote the last answer."""
        if self.last is None:
            return "there is no answer yet"
        if not self.last.spans:
            return "the last answer has not ended: its versions come with its end"
        return ", ".join(f"version {version} wrote {num} tokens" for version, num in self.last.spans)

    def save(self, path: Path) -> str:
        """Append the conversation to a file. Raises OSError."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self.list_messages()}, ensure_ascii=False) + "\n")
        return f"{len(self.messages)} messages are in {path} now"


def _read_text() -> str:
    """A line, or several. Raises EOFError."""
    with suppress(ImportError):  # of systems without it; a pasted text is one then, with its line breaks
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        text = input("> ")
        if text.startswith('"""'):
            text = text.removeprefix('"""')
            while not text.endswith('"""'):
                text += "\n" + input()
            text = text.removesuffix('"""')
    except KeyboardInterrupt:
        click.echo("\n/quit leaves")
        return ""
    return text.strip()


def _take(talk: Conversation, text: str) -> bool:
    """Do what a line says; returns False for the last one."""
    word, _, rest = text.partition(" ")
    rest = rest.strip()
    try:
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                click.echo("\n".join(f"  {each:14}{what}" for each, what in HELP.items()))
            case "/reset":
                talk.messages.clear()
            case "/system" if rest:
                talk.system = rest
            case "/system":
                click.echo(talk.system or "nothing is set")
            case "/version":
                click.echo(talk.describe_versions())
            case "/save" if rest:
                click.echo(talk.save(Path(rest).expanduser()))
            case _ if word.startswith("/"):
                known = [each.split()[0] for each in HELP if each.startswith("/")]
                click.echo(f"{word} is no command. {suggest(word, known) or '/help shows them'}")
            case _:
                talk.answer(text)
    except KeyboardInterrupt:
        click.secho("cancelled", dim=True)
    except (ShoalError, OSError) as error:
        hint = ". /reset begins again" if " context of " in str(error) else ""
        click.secho(f"{error}{hint}", fg="red", err=True)
    return True
