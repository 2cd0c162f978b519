"""`shoal sessions`: what agents and a run's model have said to each other, as tables, texts and samples; and `shoal
evaluate`: what the answers of a registered model are worth."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any

import click

from shoal.errors import RunError
from shoal.extend.cli import CommandGroup, FiniteRange, NotNegative, Positive, render_table, verb
from shoal.extend.registry import LocalModel, find_version
from shoal.extend.runs import Panel, format_age, list_runs, load
from shoal.libs.agents.sessions.session import State
from shoal.libs.agents.sessions.store import FILE_NAME
from shoal.libs.agents.tasks import EpisodeFailed, grade_answer, load_environment
from shoal.libs.agents.transcripts import Transcripts, format_reward, format_task

ALL = -1
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey what a model has written
MAX_SHOWN = 60  # characters, of an answer in a table
COLUMNS = ("id", "state", "why", "group", "turns", "tokens", "reward", "age")


@click.group(cls=CommandGroup)
def sessions() -> None:
    """The sessions of a run of agents: list them, read one, write what they said for fine-tuning.

    \b
    Examples:
      shoal sessions list
      shoal sessions show s0c9a6f1be2d34a5b6c7d
      shoal sessions export latest --min-reward 0.8 > good.jsonl
    """


def _list_transcripts() -> Iterator[Transcripts]:
    """Those of this host, of the newest run first."""
    for run in list_runs(ALL):
        if (run.folder / FILE_NAME).is_file():
            yield Transcripts(run)


def _open(run: str | None) -> Transcripts:
    """Those of a run, or of the newest one that has any. Raises RunError."""
    transcripts = Transcripts(load(run)) if run else next(_list_transcripts(), None)
    if transcripts is None:
        raise RunError("there is no run of agents on this host yet: shoal run agents --help")
    return transcripts


def _show_list(listed: Sequence[Mapping[str, Any]]) -> object:
    rows = []
    for each in listed:
        age, reward = format_age(time.time() - each["opened_at"]), format_reward(each["reward"])
        shown = {**each, "age": age, "reward": reward}
        rows.append([str(shown[name]) for name in COLUMNS])
    return render_table(Panel(title="sessions", header=COLUMNS, rows=rows))


@sessions.verb("list", show=_show_list)
def list_sessions(
    run: str | None = None,
    *,
    state: Annotated[State | None, "Only sessions in this state."] = None,
    limit: Annotated[Positive, "How many to list."] = 20,
) -> list[dict[str, Any]]:
    """List the sessions of a RUN, by default the newest run of agents, newest first.

    \b
    Examples:
      shoal sessions list
      shoal sessions list latest --state failed --limit 100
      shoal sessions list --json
    """
    transcripts = _open(run)
    chosen = [each for each in reversed(transcripts.records.list_all()) if state in (None, each.state)]
    return [transcripts.records.fill(each).describe() for each in chosen[:limit]]


def _clean(text: str) -> str:
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _show_session(shown: Mapping[str, Any]) -> Iterator[str]:
    why = f" ({shown['why']})" if shown["why"] else ""
    yield f"{shown['id']} of run {shown['run']}: {shown['state']}{why}, reward {format_reward(shown['reward'])}"
    yield f"task: {format_task(shown['task'])}"
    for turn in shown["turns"]:
        behind = "" if turn["parent"] is None else f" behind turn {turn['parent']}"
        versions = ", ".join(f"{num} tokens of version {version}" for version, num in turn["versions"])
        why_not = "" if turn["trains"] else f", not learnt ({turn['why_not']})"
        yield f"\nturn {turn['id']}{behind}: {versions}, {turn['finish'] or 'cancelled'}{why_not}"
        yield click.style(_clean(turn["prompt"]), dim=True)
        yield _clean(turn["answer"])


@sessions.verb(show=_show_session)
def show(session: Annotated[str, "ID"]) -> dict[str, Any]:
    """Show a session: its task, its turns as texts with all special tokens, versions, and its reward.

    \b
    Examples:
      shoal sessions show s0c9a6f1be2d34a5b6c7d
      shoal sessions show s0c9a6f1be2d34a5b6c7d --json
    """
    for transcripts in _list_transcripts():
        if (found := transcripts.records.find(session)) is not None:
            described = transcripts.records.fill(found).describe()
            return {**described, "run": transcripts.run.id, "turns": [*transcripts.describe_turns(found)]}
    raise RunError(f"no run of this host has the session {session!r}: `shoal sessions list` shows those of one")


@sessions.verb()
def export(
    run: str | None = None,
    *,
    min_reward: Annotated[float | None, "Only sessions of at least this reward."] = None,
    as_json: Annotated[bool, "--json", "Print whole sessions: tokens, masks, log-probabilities and versions."] = False,
) -> Iterator[str]:
    """Print what the sessions of a RUN said, as lines of JSON that `shoal run finetune data=` reads.

    RUN is by default the newest run of agents. Each answer that came to its end, of a session with a reward, is a line:
    its prompt and its completion.

    \b
    Examples:
      shoal sessions export --min-reward 0.8 > good.jsonl
      shoal run finetune model=./SmolLM2 data=good.jsonl
      shoal sessions export latest --json > segments.jsonl
    """
    transcripts = _open(run)
    for each in map(transcripts.records.fill, transcripts.records.list_all()):
        if each.reward is None or (min_reward is not None and each.reward < min_reward):
            continue
        if as_json:
            yield json.dumps(each.export())
        else:
            yield from map(json.dumps, transcripts.make_samples(each))


def _show_evaluation(evaluated: Mapping[str, Any]) -> Iterator[object]:
    answers = evaluated["answers"]
    rows = [
        [
            *(_clean(" ".join(text.split()))[:MAX_SHOWN] for text in (each["task"], each["answer"])),
            each["failed"] or format_reward(each["reward"]),
        ]
        for each in answers
    ]
    yield render_table(Panel(title="answers", header=("task", "answer", "reward"), rows=rows))
    yield f"{evaluated['model']}: mean reward {format_reward(evaluated['reward'])} of {len(rows)} answers"


@verb(show=_show_evaluation, work="answering")
def evaluate(
    model: Annotated[str, "NAME[@VERSION]"],
    env: Annotated[str, "ENV"],
    *,
    tasks: Annotated[Positive, "How many."] = 32,
    seed: Annotated[NotNegative, "Of the first task; the next ones follow."] = 0,
    temperature: Annotated[float, FiniteRange(min=0), "0 takes the likeliest token."] = 0.0,
    max_tokens: Annotated[Positive, "Of an answer."] = 1024,
) -> dict[str, Any]:
    """Let a registered language model answer tasks, in this process, and print its rewards.

    ENV makes the tasks and grades the answers, as for `shoal run agents`. To compare versions, give tasks from which
    none has learnt: at temperature 0 a version has the same rewards each time.

    \b
    Examples:
      shoal evaluate smollm@champion my_env.py:held_out
      shoal evaluate smollm@2 reasoning_gym:chain_sum --seed 1000000 --max-tokens 64
    """
    environment, local = load_environment(env), LocalModel(find_version(model))
    made = [environment.make_task(number) for number in range(seed, seed + tasks)]
    texts = [local.chat(each.messages, temperature=temperature, max_tokens=max_tokens) for each in made]  # some at once
    answers: list[dict[str, Any]] = []
    for task, answer in zip(made, (each.read().text for each in texts), strict=True):
        reward, failed = None, ""
        try:
            reward = grade_answer(environment, task, answer)
        except EpisodeFailed as error:
            failed = str(error)
        asked = format_task({"messages": task.messages})
        answers.append({"task": asked, "answer": answer, "reward": reward, "failed": failed})
    rewards = [each["reward"] for each in answers if each["reward"] is not None]
    return {"model": f"{local.name}@{local.version}", "reward": fmean(rewards) if rewards else None, "answers": answers}
