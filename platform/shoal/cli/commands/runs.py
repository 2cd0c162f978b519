"""`shoal runs`, `shoal logs` and `shoal release`: the recorded runs, as tables and JSON.

Parse, call, print: `shoal.runs` reads and removes.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Annotated

import click
from rich.table import Column
from rich.text import Text

from shoal.cli.display import run_view
from shoal.cli.display.rl_display import describe_spaces
from shoal.cli.support.console import (
    confirm_removal,
    format_facts,
    make_literal_console,
    make_number_column,
    make_table,
    remove_old,
)
from shoal.cli.support.jobs import RAY_LOG_LINE, follow_output
from shoal.cli.support.options import DryRun, NotNegative, OlderThan, Positive, Texts, Yes
from shoal.cli.support.verbs import AsJson, DefaultCommandGroup, verb
from shoal.cluster.attach import find_running_cluster
from shoal.errors import ConfigError, RunError
from shoal.home import home
from shoal.plugins.find import load_sound_extensions
from shoal.registry import Registry
from shoal.rl.experience.quarantine import release_in_run
from shoal.rl.gateway.game_settings import change_game_settings, parse_settings
from shoal.runs import Run, RunKind, Status, list_runs, load
from shoal.runs.event_messages import WAITING, format_warning
from shoal.runs.formatting import (
    format_age,
    format_duration,
    format_metric,
    format_number,
    format_timestamp,
    format_value,
)
from shoal.runs.output_files import DRIVER, OutputReader
from shoal.runs.record.removal import (
    choose_old_runs,
    list_leftovers,
    reject_running_runs,
    remove_leftovers,
    remove_runs,
    vacuum,
)
from shoal.runs.run_kind import infer_fields
from shoal.runs.run_reader import VALIDATION

NUM_EVENTS = 8
FOLLOW_S = 0.5
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
ANY_NUMBER = -1  # of SQLite's LIMIT
_RESUMABLE = frozenset(
    {RunKind.LOOP, RunKind.TRAINING, RunKind.POPULATION, RunKind.SWEEP, RunKind.STREAM, RunKind("agents")}
)
MAX_UNFOLDED_ID_LENGTH = 32  # longer, user-chosen ids are folded to leave space for the other columns
_COLOURS = {
    Status.RUNNING: "blue",
    Status.FINISHED: "green",
    Status.FAILED: "red",
    Status.LOST: "yellow",
    Status.NOT_REACHED: "yellow",
}


@click.group(cls=DefaultCommandGroup)
def runs() -> None:
    """List the runs, newest first, or show one RUN; remove runs, or send one to a tracker.

    `shoal runs RUN` is `shoal runs show RUN`: its id, the beginning of one, or `latest`. See `shoal runs show --help`
    for the options --limit, --json and --follow.

    \b
    Examples:
      shoal runs
      shoal runs rm 20261120-0645
      shoal runs prune --keep 50 --older-than 30d
      shoal runs track latest --to mlflow
    """


def _show(shown: Run | list[Run] | None) -> object:
    if not isinstance(shown, list):
        return shown and _show_run(shown)
    if not shown:
        return "There are no runs yet. Start one:\n\n  shoal run --help"
    is_short = all(len(each.id) <= MAX_UNFOLDED_ID_LENGTH for each in shown)
    columns = [
        Column("run", no_wrap=is_short, overflow="fold"),
        Column("name", overflow="fold"),
        Column("status", no_wrap=True),
        *map(make_number_column, ("age", "duration")),
        Column("best", overflow="fold"),
    ]
    return make_table(*columns, rows=map(_make_cells, shown)), Text(
        f"One of them: shoal runs {shown[0].id}", style="dim"
    )


def _make_cells(run: Run) -> list[str | Text]:
    best = run.best()
    judged = f"{format_number(best[1])} {best[0].removeprefix(VALIDATION)}" if best else "-"
    age, duration = format_age(time.time() - run.created_at), format_duration(run.duration_s)
    host = "" if run.copied_from is None else f" on {run.copied_from}"
    status = Text(f"{run.status.value}{host}", style=_COLOURS.get(run.status, "default"))
    if run.read_queue_entry() is not None:
        status = Text(WAITING, style="yellow")
    return [run.id, run.name, status, age, duration, judged]


def _show_run(run: Run) -> Iterator[object]:
    dirty = ", with uncommitted changes" if run.git_dirty else ""
    entry = run.read_queue_entry()
    status = run.status.value if entry is None else f"{WAITING}: {format_warning(WAITING, entry)}"
    colour = _COLOURS.get(run.status) if entry is None else "yellow"
    facts = [
        ("run", run.id),
        ("name", run.name),
        ("status", click.style(status, fg=colour)),
        ("error", run.error and click.style(run.error, fg="red")),
        ("started", f"{format_timestamp(run.created_at)}, {format_age(time.time() - run.created_at)} ago"),
        ("duration", format_duration(run.duration_s)),
        ("process", f"{run.pid} on {run.host}{'' if run.copied_from is None else ' (this is a copy from the store)'}"),
        ("git", f"{run.git_revision[:10]}{dirty}" if run.git_revision else "not in a repository"),
        ("command", run.list_commands()[-1]),
        ("spaces", describe_spaces(run)),
        ("files", str(run.folder)),
    ]
    yield format_facts(facts)
    yield from _show_record(run)
    yield Text("\nWhat to type next", style="bold")
    models = [f"{row['name']}@{row['version']}" for row in run.models().tail(1).to_dict("records")]
    commands = [f"shoal report {run.id}", *list_views(run, models)]
    if run.status in (Status.FAILED, Status.LOST, Status.STOPPED, Status.NOT_REACHED):
        commands.append(format_resume_command(run))
    yield from (f"  {command}" for command in commands)


def _make_section(title: str, rows: Sequence[Sequence[str | Text]]) -> Iterator[object]:
    """Rows below a title; nothing without rows."""
    if rows:
        table = make_table(*(Column(overflow="fold") for _ in rows[0]), rows=rows)
        table.show_header, table.padding = False, (0, 2, 0, 2)
        yield from (Text(f"\n{title}", style="bold"), table)


def _show_record(run: Run) -> Iterator[object]:
    """Its newest metrics, or what its kind shows in their place; endpoints, models and events."""
    latest, events = run.latest(), run.events().tail(NUM_EVENTS).to_dict("records")
    if (shown := run_view.render_record(run)) is not None:
        yield from (Text(f"\n{shown[0]}", style="bold"), shown[1])
    elif not latest:
        yield "\nNo metrics have been logged."
    else:
        metrics = [(name, Text(format_metric(name, value), justify="right")) for name, value in sorted(latest.items())]
        yield from _make_section("Newest metrics", metrics)
    yield from _make_section(
        "Endpoints", [(each.name, each.kind, each.address, each.state) for each in run.endpoints()]
    )
    models = [
        (f"{each['name']}@{each['version']}", ", ".join(each["aliases"])) for each in run.models().to_dict("records")
    ]
    yield from _make_section("Registered models (aliases then)", models)
    rows = []
    for event in events:
        details = "  ".join(f"{name}={format_value(value)}" for name, value in event["details"].items() if name != "at")
        rows.append((Text(format_duration(event["time"]), style="dim", justify="right"), event["kind"], details))
    yield from _make_section("Last events", rows)


def _to_json(shown: Run | list[Run]) -> object:
    return shown.to_dict() if isinstance(shown, Run) else [each.to_dict() for each in shown]


@runs.verb(show=_show, to_json=_to_json)
def show(
    run: str | None = None,
    *,
    limit: Annotated[Positive, "How many runs to list."] = 20,
    as_json: AsJson = False,
    follow: Annotated[bool, "Show RUN live; Ctrl-C ends the display, not the run."] = False,
) -> Run | list[Run] | None:
    """List the runs, newest first, or show one RUN: its id, the beginning of one, or `latest`.

    A run can be followed from anywhere on the machine that has its record, however its job was started.

    \b
    Examples:
      shoal runs
      shoal runs latest
      shoal runs 20261120-0645 --follow
    """
    if follow and (run is None or as_json):
        remedy = "for example: shoal runs latest --follow"
        raise ConfigError("follow", run or "", "needs one run, and no --json", remedy)
    if run is None:
        return list_runs(limit)
    record = load(run)
    if not follow:
        return record
    try:
        return run_view.follow_run(record, make_literal_console())
    except KeyboardInterrupt:
        click.echo(f"{record.id} goes on: shoal runs {record.id} --follow")
        return None


@verb()
def logs(
    run: str = "latest",
    *,
    follow: Annotated[bool, "Go on as lines come, to the end of the run; Ctrl-C ends the display alone."] = False,
    process: Annotated[str | None, "--of NAME", "Of one process alone: driver, worker-4711, actor-0."] = None,
) -> Iterator[str]:
    """Show what the driver of a RUN, its workers and its actors printed: by default of the newest run.

    The driver's lines come as they are, all others with the name of their process before them. They are in the run's
    folder, and stay when the run and its cluster have ended. Workers of other hosts print there. Of a training that a
    program or a notebook holds (`shoal.fit`, `python -m shoal.train`) they have its progress, problems and end.

    \b
    Examples:
      shoal logs
      shoal logs latest --follow
      shoal logs 20261120-0645 --of actor-0
    """
    record = load(run)
    reader, num_lines = OutputReader(record.folder), 0

    def is_over() -> bool:
        return not follow or record.reload().status is not Status.RUNNING

    try:
        for name, line in follow_output(reader.read_new_lines, is_over, FOLLOW_S):
            if process in (None, name) and not RAY_LOG_LINE.search(line):
                yield line if name in (DRIVER, process) else f"{name} | {line}"
                num_lines += 1
    except KeyboardInterrupt:
        return
    if not num_lines:
        problem = f"{process} has printed nothing" if process else "what it printed is not stored"
        known = ", ".join(sorted(reader.processes)) or "a run without a job prints where it was started"
        raise RunError(f"run {record.id}: {problem}: {known}")


@runs.verb("rm")
def remove(names: Annotated[Texts, "RUN..."], *, yes: Yes = False) -> Iterator[str]:
    """Remove runs: their records, and their folders with checkpoints and experience.

    A run that goes on is refused. Registered models stay. With SHOAL_STORE, a run goes from the store too, also
    if another host recorded it.

    \b
    Examples:
      shoal runs rm latest
      shoal runs rm 20261120-064501-3f2a 20261119-0900 --yes
    """
    records = list({run.id: run for run in map(load, names)}.values())
    reject_running_runs(records)
    confirm_removal([run.id for run in records], _describe_removal(), yes)
    remove_runs(records)
    yield from (f"{run.id} is removed" for run in records)


def _describe_removal() -> str:
    return "records and files, in the store too" if os.environ.get("SHOAL_STORE") else "records and files"


@runs.verb()
def prune(
    *,
    keep: Annotated[NotNegative | None, "Keep the newest runs, so many."] = None,
    older_than: Annotated[OlderThan, "Keep what ended later, such as 30d or 12h ago."] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> Iterator[str]:
    """Remove old runs, what killed processes left of runs, and free the record's disk space.

    With both options, a run goes that is beyond the newest and old. A run that goes on stays, with its trials. With
    SHOAL_STORE, runs go from the store too; those of other hosts stay.

    \b
    Examples:
      shoal runs prune --keep 50 --dry-run
      shoal runs prune --keep 50 --older-than 30d --yes
    """
    if keep is None and older_than is None:
        raise ConfigError("prune", "", "needs --keep, --older-than, or both", "as in shoal runs prune --keep 50")
    old = choose_old_runs(list_runs(ANY_NUMBER), keep or 0, older_than or 0.0, time.time())
    names = [*(run.id for run in old), *(f"{path} (no run has it)" for path in list_leftovers())]

    def remove() -> None:
        remove_runs(old)
        remove_leftovers()
        vacuum()

    return remove_old(names, _describe_removal(), remove, dry_run=dry_run, is_confirmed=yes)


@verb()
def release(run: str, actor: str) -> str:
    """Release an ACTOR of a RUN from quarantine, as `shoal status` lists it, when it has been mended.

    \b
    Examples:
      shoal release latest actor-3
    """
    record = load(run)
    release_in_run(record.folder, actor)
    return f"{actor} is released: run {record.id} takes its segments again"


@verb("set")
def set_settings(run: str, settings: Annotated[Texts, "NAME=VALUE..."]) -> str:
    """Change the SETTINGS of a RUN's games: they are told within a second, and later games when they join.

    \b
    Examples:
      shoal set latest gravity=9 speed=2
    """
    record = load(run)
    try:
        changed = parse_settings(settings)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not change_game_settings(record.folder, changed):
        raise ConfigError("run", record.id, "has no games", "name a run of actors")
    is_over = record.status not in (Status.CREATED, Status.RUNNING)
    when = " once it is resumed" if is_over else ""
    return f"run {record.id}{when}: {', '.join(f'{name}={value}' for name, value in changed.items())}"


def list_views(run: Run, models: Sequence[str]) -> list[str]:
    """Commands that show a run and the versions that it has registered, given as `NAME@VERSION`.

    They work one after the other: those that stay until Ctrl-C are the last.
    """
    commands = [f"shoal models show {each}" for each in models]
    present = [Registry().get(each) for each in models if Registry().has(each)]  # others have been removed
    if present and find_running_cluster() is None:
        commands.append("shoal up")
    for version in present:
        commands.append(f"shoal serve deploy {version.ref}")
        for suggest in load_sound_extensions("shoal.next_commands").values():
            commands += suggest(version)
    if run.kind is RunKind.LOOP and len(models) == 1:
        env = run.last_events().get("gateway_ready", {}).get("env", "{")
        where = " --env MODULE:FUNCTION" if env.startswith("{") else ""  # spaces: of games that joined
        commands.append(f"shoal play {models[0]}{where} --record film.webp")
    if (board := run.folder / "tensorboard").exists():
        commands.append(f"tensorboard --logdir {shlex.quote(str(board))}")
    return [*commands, "shoal console --open"]


def format_resume_command(run: Run, command: str = "") -> str:
    """The command that resumes a run: the job as typed, on the same cluster, with as many actors and all overrides but
    for secrets; of a Task of a notebook or a script its call.

    A run that cannot be resumed, such as an endpoint or an ablation, gets the command that started it.

    command: as typed; by default that of the record
    """
    typed = shlex.split(command or run.command)
    is_job, is_sweep = typed[:2] == ["shoal", "run"], typed[:2] == ["shoal", "sweep"]
    if not is_resumable(run) or (typed[:1] == ["shoal"] and not (is_job or is_sweep)):
        return run.command
    names = ["--actors", "--envs", "--inference", "--runtime-env", "--pip", "--image", "--env", "--address"]
    names = ["--address"] if is_sweep else names
    is_value = dict(zip(typed[1:], (word in names for word in typed), strict=False))  # of an option, as A=B of --env
    words = [each for each in typed if _OVERRIDE.match(each) and not is_value.get(each)]
    raised = _raise_limit(run)
    replaced = ("resume=", *(f"{each.partition('=')[0]}=" for each in raised))
    kept = [each for each in words if not each.startswith(replaced) and not each.endswith("=***")]
    overrides = [f"resume={run.id}", *kept, *raised]
    if "shoal.train" in typed[:4]:  # python -m, without Ray
        return shlex.join(["python", "-m", "shoal.train", *overrides])
    if not (is_job or is_sweep) and f"task: {home() / 'tasks'}" in run.spec:  # may use objects of its program
        return f'shoal.fit(..., resume="{run.id}")  # the same call in the same program'
    job = typed[2] if is_job and len(typed) > 2 else run.job
    options: list[str] = []
    for name in names:
        for index, word in enumerate(typed):
            if word == name:
                options += typed[index : index + 2]
            if word.startswith(f"{name}="):
                options += [name, word.partition("=")[2]]
    if is_sweep:  # whose record has the rest, which may not be said again
        return shlex.join(["shoal", "sweep", "--resume", run.id, *options])
    return shlex.join(["shoal", "run", job, *options, *overrides])


def _raise_limit(run: Run) -> list[str]:
    """The limit that ended a training before its target, doubled: with the same one it would end at once."""
    if run.status is not Status.NOT_REACHED or run.kind is not RunKind.TRAINING:
        return []
    from shoal.train.spec import TrainSpec

    reason = run.last_events()["trained"]["reason"]
    path = "convergence.patience" if reason == "convergence" else reason
    return [f"stop.{path}={2 * attrgetter(path)(TrainSpec.from_record(run.spec).stop):.15g}"]


def is_resumable(run: Run) -> bool:
    """Whether its job has the field `resume`."""
    return run.kind in _RESUMABLE or "resume" in infer_fields(run.spec)
