"""`shoal chat`: a conversation with a language model in the terminal; of a text in a pipe, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any

import click

from shoal.client import StreamedText
from shoal.client.discovery import find_endpoint
from shoal.errors import ConfigError, ShoalError, suggest
from shoal.extend.cli import FiniteRange, Key, Positive, ca_option, verb
from shoal.extend.registry import LocalModel, ModelVersion, Registry, find_version, split_ref
from shoal.extend.runs import WaitReporter

HELP = """\
  /system TEXT  set what the model shall be; without TEXT, nothing
  /version      show which version wrote each token of the last answer
  /save FILE    append the conversation as a line of JSON, from which `shoal run finetune data=FILE` learns
  /reset        begin the conversation again
  /quit         leave; Ctrl-D, too. Ctrl-C cancels an answer
  \"""           begin and end a text of several lines; what is pasted may have them anyway"""
COMMANDS = ("/system", "/version", "/save", "/reset", "/help", "/quit")
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})  # a model must not steer the terminal


@verb()
@ca_option
def chat(
    model: Annotated[str, "NAME[:ADAPTER][@VERSION]"],
    *,
    system: Annotated[str, "--system TEXT", "What the model shall be."] = "",
    temperature: Annotated[float | None, FiniteRange(min=0), "0 takes the likeliest token.  [default: 1]"] = None,
    max_tokens: Annotated[Positive, "Of an answer."] = 1024,
    seed: Annotated[int | None, "The same answers again."] = None,
    endpoint: Annotated[
        str | None, "--endpoint NAME|URL", "Ask an endpoint.  [default: the model's weights, in this process]"
    ] = None,
    key: Key = "",
) -> None:
    """Talk with a language model: one of the registry, in this process, or one of an endpoint.

    An answer is shown while it is written; Ctrl-C cancels it. A text in a pipe is answered once. NAME is the newest
    version, or the one that an endpoint chooses.

    \b
    Examples:
      shoal chat smollm@champion
      shoal chat smollm --system "Answer in one sentence." --temperature 0.7
      echo "What is a shoal?" | shoal chat smollm --max-tokens 60
      shoal chat smollm --endpoint https://models.example:8000 --key MY-KEY
    """
    given: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    fields = {name: value for name, value in given.items() if value is not None}
    with ExitStack() as stack:
        if endpoint is None:
            local = LocalModel(find_version(model))
            model = f"{local.name}@{local.version}"
            if sys.stderr.isatty():
                click.secho(f"loading {model}", dim=True, err=True)
            with WaitReporter(f"loading {model}"):
                has_chat = local.has_chat
            talk = Conversation(lambda messages: local.chat(messages, **fields), system)
        else:
            name = model.partition("@")[0]
            _, version = split_ref(ref := model[name.rfind(":") + 1 :])  # an adapter, or the model itself
            model = f"{name}@{Registry().get(ref).version}" if version and not version.isdigit() else model
            target = find_endpoint(endpoint)
            client = stack.enter_context(target.connect(key))
            has_chat = client.has_chat(name)
            talk = Conversation(lambda messages: client.chat(model, messages, **fields), system)
        if not has_chat:
            problem, remedy = (
                "has no chat template, and so no conversation",
                "`shoal predict NAME --text` continues texts",
            )
            raise ConfigError("model", model, problem, remedy)
        if not sys.stdin.isatty():
            if not (text := sys.stdin.read().strip()):
                raise ConfigError("stdin", "", "has no text", "echo TEXT | shoal chat NAME")
            talk.answer(text)
            return
        click.secho(
            f"{model}{f' at {endpoint}' if endpoint else ''}; /help shows what else there is", dim=True, err=True
        )
        with suppress(EOFError):
            while talk.take(_read_text()):
                pass


def suggest_commands(version: ModelVersion) -> list[str]:
    """What to type next with a language model: it gives logits [B, T, V], and has a tokenizer. None for others."""
    shapes = [each.shape for each in version.manifest.signature.outputs]
    if [len(each) for each in shapes] != [3] or "tokenizer_config.json" not in version.manifest.files:
        return []
    base = version.manifest.lineage.get("base")
    beside = f"shoal serve deploy {base} endpoint.model.text.adapters='[{version.name}]'"
    return [f"shoal chat {version.ref}", *[beside] * bool(base)]


class Conversation:
    """Messages so far, and the last answer."""

    def __init__(self, ask: Callable[[list[dict[str, str]]], StreamedText], system: str = "") -> None:
        self._ask, self._system = ask, system
        self._messages: list[dict[str, str]] = []
        self._last: StreamedText | None = None

    def answer(self, text: str) -> None:
        """Write the answer to a message as it comes. A message that gets none is forgotten. Raises what `Client.chat`
        does, KeyboardInterrupt."""
        self._last = None
        self._messages.append({"role": "user", "content": text})
        try:
            with closing(self._ask(self._list_messages())) as self._last:
                for part in self._last:
                    click.echo(part.translate(_CONTROLS) if sys.stdout.isatty() else part, nl=False)
        finally:
            if self._last is None or not self._last.text:
                self._messages.pop()
                if self._last is not None and self._last.finish:
                    click.secho("the answer is empty", dim=True, err=True)
            else:
                click.echo()
                self._messages.append({"role": "assistant", "content": self._last.text})

    def take(self, text: str) -> bool:
        """Do what a line says; returns False for the last one."""
        name, _, rest = text.partition(" ")
        if name == "/quit":
            return False
        try:
            if name.startswith("/"):
                click.echo(self._do(name, rest.strip()))
            elif text:
                self.answer(text)
        except KeyboardInterrupt:
            click.secho("cancelled", dim=True)
        except (ShoalError, OSError) as error:
            hint = ". /reset begins again" if " context length of " in str(error) else ""
            click.secho(f"{error}{hint}", fg="red", err=True)
        return True

    def _do(self, name: str, rest: str) -> str:
        match name:
            case "/help":
                return HELP
            case "/reset":
                self._messages.clear()
                return "the conversation is empty"
            case "/system":
                self._system = rest
                return f"system: {rest}" if rest else "there is no system prompt now"
            case "/version":
                spans = self._last.spans if self._last is not None else ()
                return ", ".join(f"version {each} wrote {num} tokens" for each, num in spans) or "no answer has ended"
            case "/save" if not (rest and self._messages):
                return "the conversation is empty: nothing is saved" if rest else "/save needs a FILE: /save talk.jsonl"
            case "/save":
                with Path(rest).expanduser().open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"messages": self._list_messages()}, ensure_ascii=False) + "\n")
                return f"{len(self._messages)} messages are in {rest} now"
        return f"{name} is no command. {suggest(name, COMMANDS) or '/help shows them'}"

    def _list_messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] * bool(self._system) + self._messages


def _read_text() -> str:
    """A line, or several. Raises EOFError."""
    with suppress(ImportError):  # of systems without it; with it, a pasted text is one, with its line breaks
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
