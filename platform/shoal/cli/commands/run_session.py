"""A run that a command starts: a cluster if needed, the job and its actors, shown until the end.

It owns the processes that it starts and always ends them all; an existing cluster stays. Called by `shoal run` and
`shoal sweep`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

import shoal
import shoal.runs
from shoal.cli.commands.runs import format_resume_command, is_resumable, list_views
from shoal.cli.display import run_view, train_display
from shoal.cli.display.panels import RunView
from shoal.cli.support.console import make_literal_console
from shoal.cli.support.groups import interrupt_on_termination
from shoal.cli.support.jobs import (
    JobLogReader,
    describe_failure,
    find_job,
    follow_lines,
    ignore_further_interrupts,
    job_environment,
    split_secret_overrides,
    validate_overrides,
)
from shoal.cluster import jobs as ray_jobs
from shoal.cluster.attach import find_cluster
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.embedded_cluster import start_cluster
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.cluster.runtime_env import JobEnvironment
from shoal.config import format_override, last_override
from shoal.errors import ClusterError, ConfigError, ConnectionLost, NotReached, RunError
from shoal.flows.actor_processes import ActorProcesses
from shoal.home import load_access_token
from shoal.recipes import is_recipe
from shoal.runs import Run, Status
from shoal.runs.event_messages import REGISTERED
from shoal.runs.formatting import format_duration, format_metric, format_number
from shoal.runs.record.opening import make_run_id
from shoal.runs.record.provenance import format_masked_command, make_command_variable
from shoal.runs.waits import WaitReporter

ACTORS_END_S = 10.0
REMOTE_TIMEOUT_S = 7 * 24 * 3600.0  # a job on a remote cluster


@dataclass(frozen=True)
class RunArguments:
    """The typed arguments, as far as they define the run."""

    job: str
    overrides: tuple[str, ...]
    num_actors: int
    address: str | None = None
    num_environments: int = 1  # of an actor
    inference: str = "local"
    environment: JobEnvironment = field(default_factory=JobEnvironment)
    environment_options: tuple[str, ...] = ()  # as typed, without values of variables

    @property
    def has_remote_inference(self) -> bool:
        """Whether it starts actors that let the gateway run their policy."""
        return self.num_actors > 0 and self.inference == "remote"

    def to_command_line(self) -> str:
        """The command that starts the same run again, without secrets."""
        actors = ["--actors", str(self.num_actors)] if self.num_actors else []
        actors += ["--envs", str(self.num_environments)] if self.num_environments > 1 else []
        actors += ["--inference", self.inference] if self.inference != "local" else []
        address = ["--address", self.address] if self.address else []
        options = [*actors, *self.environment_options, *address]
        return format_masked_command(["shoal", "run", self.job, *options, *self.overrides])


def launch_run(typed: RunArguments, *, plain: bool) -> None:
    """Run the job to its end, and show it. Exits with 130 when interrupted.

    Raises ConfigError, RunError when the job failed, and ClusterError.
    """
    interrupt_on_termination()
    console = make_literal_console()
    session: RunSession | None = None
    with ExitStack() as stack:
        try:
            path = find_job(typed.job)
            if typed.has_remote_inference and typed.num_environments > 1:
                problem, remedy = "is for actors that run the policy themselves", "with --inference remote: --actors"
                raise ConfigError("envs", typed.num_environments, problem, remedy)
            cluster = find_cluster(typed.address)
            if cluster is not None and not cluster.is_local:
                _run_remote(cluster, typed, path, console)
                return
            session = RunSession(typed, path, console, plain or not console.is_terminal)
            session.run(cluster, stack)
        except KeyboardInterrupt:
            ignore_further_interrupts()
            console.print("stopping what was started for this run ...")
            stack.close()
            console.print(f"stopped. {session.format_resume_hint() if session else ''}".rstrip())
            sys.exit(130)


class RunSession:
    """One run on a cluster of this machine: its processes and its display."""

    def __init__(self, typed: RunArguments, path: Path, console: Console, plain: bool) -> None:
        self._typed = typed
        self._path = path
        self._overrides = typed.overrides
        self._num_actors = typed.num_actors
        self._console, self._plain = console, plain
        resumed = last_override(self._overrides, "resume")
        if not resumed and any(override.startswith("resume=") for override in self._overrides):
            raise ConfigError("resume", "", "names no run", "`shoal runs` lists them")
        before = shoal.runs.load(resumed) if resumed else None
        if before is not None and before.status is Status.RUNNING:  # before a cluster starts for it
            raise RunError(f"run {before.id!r} is still running (process {before.pid} on {before.host}): stop it first")
        self.run_id = before.id if before else make_run_id()
        self._incarnation_before = before.incarnation if before else 0
        self._resumed = before is not None
        self._actors: ActorProcesses | None = None
        self._notes: list[str] = []
        self._printed_lines: list[str] = []  # of a job, and notes; the live display shows all notes all the time
        self._view: RunView | None = None
        self._shows_metrics = False
        self._record: Run | None = None
        self._job: ray_jobs.JobHandle | None = None
        self._line_throttle = run_view.LineThrottle()
        self._job_log: JobLogReader | None = None
        self._reporter = WaitReporter(f"waiting for the job {path.stem!r}")  # until there is a view of its run

    def run(self, cluster: ClusterHandle | None, stack: ExitStack) -> None:
        """Start everything, show it, and report how it ended. Raises RunError when the job failed."""
        stack.enter_context(self._reporter)
        environment = {ACTORS_INFERENCE: self._typed.inference} if self._num_actors else {}
        added = self._typed.environment
        env = job_environment(self.run_id, self._typed.to_command_line())
        added.require_combinable(env | environment, is_uploaded=False)
        environment |= added.to_variables()
        if cluster is None:
            # On a running cluster, the job itself validates just as soon; in another Python, it alone can.
            if not added.has_own_python:
                environment |= validate_overrides(self._path, self._overrides, environment)
            self._console.print("starting a Ray cluster for this run ...")
            embedded = start_cluster()
            stack.callback(embedded.stop)
            cluster = embedded
        overrides = [each for each in self._overrides if not each.startswith("resume=")]
        overrides += [format_override("resume", self.run_id)] if self._resumed else []
        shown, secrets = split_secret_overrides(self._path, overrides)
        self._job = ray_jobs.JobHandle(cluster, ray_jobs.new_submission_id())
        self._job_log = JobLogReader(self._job)
        stack.callback(self._job.stop_quietly)  # before the submission: an interruption may come at any moment
        stack.callback(lambda: self._actors.end() if self._actors is not None else None)
        entrypoint = ["python" if added.has_own_python else sys.executable, str(self._path), *shown]
        env |= secrets | environment
        ray_jobs.submit(cluster, entrypoint, env=env, submission_id=self._job.submission_id, runtime_env=added.fields)
        try:
            outcome = self._follow()
        except (ClusterError, ConnectionLost) as error:
            lost = (f"the cluster has ended, or does not answer: {error}", self.format_resume_hint())
            raise RunError("\n".join(lost).rstrip()) from None
        notes = self._take_new_notes()  # of actors that ended by themselves, before the others are stopped
        if self._actors is not None:
            self._actors.finish(ACTORS_END_S)
        if outcome is not ray_jobs.JobStatus.SUCCEEDED:
            what = "the job" if self._record is None else f"the job of run {self.run_id}"
            lines = (added.mask(describe_failure(self._job, what, outcome)), *notes, self.format_resume_hint())
            problem = "\n".join(lines).rstrip()
            if self._job.info().has_missed_target:
                self._print_summary()
                raise NotReached(problem)
            raise RunError(problem)
        self._print_summary()

    def format_resume_hint(self) -> str:
        """The command that resumes the run, if its record can be resumed, or that shows how it finished."""
        if self._record is None and not self._resumed:
            return ""
        record = shoal.runs.load(self.run_id)
        is_asked_again = not any(each for each in self._overrides if not each.startswith("resume="))
        if record.status is Status.FINISHED and (self._record or is_asked_again):
            return f"The run has finished: shoal runs {record.id}"
        if not (self._resumed or is_resumable(record)):
            return ""
        models = " and ".join(f"{name}@{version}" for name, version, *_ in record.list_models())
        registered = f"It has registered {models}. " if models else ""
        return f"{registered}Go on with: {format_resume_command(record, self._typed.to_command_line())}"

    # -- while it runs --------------------------------------------------------------------------------------------

    def _follow(self) -> ray_jobs.JobStatus:
        if self._plain:
            while (outcome := self._poll()) is None:
                if self._view is not None:
                    for note in self._take_new_notes():
                        self._console.print(note)
                    if line := self._line_throttle.format_if_due(self._view):
                        self._console.print(line)
            return outcome
        with Live(console=self._console, refresh_per_second=4, transient=True) as live:
            while (outcome := self._poll()) is None:
                if self._view is not None:
                    live.update(run_view.render(self._view, self._console.width))
        return outcome

    def _poll(self) -> ray_jobs.JobStatus | None:
        """Read the run; returns the job's final state when it is over.

        Raises RunError when all started actors have failed before the run received any experience.
        """
        assert self._job is not None
        time.sleep(run_view.REFRESH_S)
        self._read_record()
        outcome = self._job.poll_outcome()  # first, so that the job's last output is not missed
        if not self._shows_metrics:
            view = self._view  # its first metrics may come with lines, which are printed
            self._shows_metrics = view is not None and bool(view.metrics or view.phase == train_display.TRAINING)
            assert self._job_log is not None
            for line in self._job_log.read_new_lines(is_over=outcome is ray_jobs.JobStatus.SUCCEEDED):
                self._console.print(masked := self._typed.environment.mask(line))  # not every job records metrics
                self._reporter.note_line()
                self._printed_lines.append(masked)  # the record may say it again
            if outcome is None and not self._shows_metrics and self._actors is not None and self._actors.are_all_dead:
                lost = "no actor is left, and none has sent anything"
                raise RunError("\n".join((lost, *self._take_new_notes(), self.format_resume_hint())))
        return outcome

    def _read_record(self) -> None:
        try:
            record = shoal.runs.load(self.run_id)
        except RunError:
            return  # the job has not begun to record yet
        if record.incarnation <= self._incarnation_before:
            return  # still the record of the earlier attempt
        if self._record is None:  # a run that was refused has no id
            self._console.print(f"run {record.id}: {self._path.stem} {format_masked_command(self._overrides)}".rstrip())
        self._record = record
        addresses = {point.kind: point.address for point in self._record.endpoints() if point.state == "ready"}
        if "gateway" in addresses and self._actors is None and self._num_actors:
            details = self._record.last_events(since_resumed=True)["gateway_ready"]
            # Actors find modules next to the job's file, as the job does.
            places = [os.environ.get("PYTHONPATH", ""), str(self._path.parent)]
            variables = {"SHOAL_TOKEN": load_access_token(), "PYTHONPATH": os.pathsep.join(filter(None, places))}
            options = ["--envs", str(self._typed.num_environments), "--inference", self._typed.inference]
            self._actors = ActorProcesses(self._record.folder, variables)
            self._actors.start(
                self._num_actors,
                details.get("bound") or details.get("connect") or details["address"],
                details["env"],
                details["server_key"],
                options,
                ignored=details.get("ignore", ()),
                record_every=details.get("record_every", 0),
            )
        notes = self._notes + self._describe_dead_actors()
        self._view = run_view.make_view(record, self._view, notes)
        if self._view is not None or addresses:  # an endpoint is ready: nothing is waited for
            self._reporter.wait_for("")

    def _take_new_notes(self) -> list[str]:
        """The problems not printed yet."""
        seen = self._view.notes if self._view is not None else ()
        new = [
            note
            for note in dict.fromkeys((*self._notes, *self._describe_dead_actors(), *seen))
            if note not in self._printed_lines
        ]
        self._printed_lines += new
        return new

    # -- actors ---------------------------------------------------------------------------------------------------

    def _describe_dead_actors(self) -> list[str]:
        return self._actors.describe_dead() if self._actors is not None else []

    # -- the end --------------------------------------------------------------------------------------------------

    def _print_summary(self) -> None:
        try:
            record = shoal.runs.load(self.run_id)
        except RunError:
            return  # a program without a record: its output was shown
        events, registered = record.last_events(since_resumed=True), record.models()
        models = registered[registered["time"] >= record.last_started_at() - record.created_at].to_dict("records")
        say = self._console.print
        if "trained" in events:
            trained = events["trained"]
            ended = f" after {format_duration(trained['seconds'])}, step {trained['kept']:,} kept"
            say(Text.assemble((trained["detail"], "green"), ended))
            measured = [
                Text.assemble(f"{name} ", (format_metric(name, value), "bold"))
                for name, value in trained["metrics"].items()
            ]
            say(Text("evaluated ") + Text(", ").join(measured) if measured else "there was no validation data")
        if (shown := run_view.render_record(record)) is not None:
            say(shown[1])
        if "solved" in events:
            seconds, steps = events["solved"]["seconds"], events["solved"]["steps"]
            details = f" {seconds:.1f} s after the first segment, with {steps:,} environment steps"
            say(Text.assemble(("solved", "green"), details))
        for model in models:
            ref = (f"{model['name']}@{model['version']}", "bold")
            aliases = f" ({', '.join(model['aliases'])})" if model["aliases"] else ""
            say(Text.assemble("registered ", ref, aliases))
        for _, entry in record.list_events(REGISTERED, since_resumed=True):
            say(entry["decision"])
        if "evaluated" in events:
            played = events["evaluated"]
            details = f" over {len(played['returns'])} episodes played through the endpoint's HTTP interface"
            mean = (format_number(played["mean_return"]), "bold")
            say(Text.assemble("mean return ", mean, f"{details} ({played['requests']} requests)"))
        if "policies_evaluated" in events:
            for name, returns in events["policies_evaluated"]["returns"].items():
                mean = (format_number(statistics.fmean(returns)), "bold")
                details = f" over {len(returns)} episodes played through the endpoint"
                say(Text.assemble(f"mean return of {name} ", mean, details))
        say(f"run folder      {record.folder}")
        for label, name in (("report", "report.html"), ("learning curve", "learning_curve.png")):
            if (record.folder / name).exists():
                say(f"{label:<15} {record.folder / name}")
        say("what next:")
        if shutil.which("shoal") is None:  # it was started by its path, as by `make demo`
            say(f"  source {shlex.quote(sys.prefix)}/bin/activate")
        say(f"  shoal runs {record.id}")
        for command in list_views(record, [f"{model['name']}@{model['version']}" for model in models]):
            say(f"  {command}")


def _run_remote(cluster: ClusterHandle, typed: RunArguments, path: Path, console: Console) -> None:
    """Submit to a remote cluster, which has the record, and follow the output."""
    if typed.num_actors:
        remedy = "start actors by hand, with the command that the job prints"
        raise ConfigError("actors", typed.num_actors, "cannot be started for a cluster on another machine", remedy)
    folder = Path.cwd().resolve()
    if path.is_relative_to(folder):
        program = [str(path.relative_to(folder))]
    elif is_recipe(path):
        program = ["-m", "shoal.recipes", path.stem]  # it goes with the package
    else:
        remedy = "run from the folder that holds it, or copy it here"
        raise ConfigError("job", str(path), f"lies outside {folder}", remedy)
    shown, secrets = split_secret_overrides(path, typed.overrides)
    entrypoint = ["python", *program, *shown]
    env = make_command_variable(typed.to_command_line()) | secrets
    typed.environment.require_combinable(env, is_uploaded=True)
    env |= typed.environment.to_variables()
    fields = typed.environment.fields
    console.print(ray_jobs.describe_upload(folder))
    job = ray_jobs.JobHandle(cluster, ray_jobs.new_submission_id())
    try:
        ray_jobs.submit(
            cluster, entrypoint, env=env, working_dir=folder, submission_id=job.submission_id, runtime_env=fields
        )
        console.print(f"job {job.submission_id} on {cluster.dashboard_url}")
        for line in follow_lines(job, REMOTE_TIMEOUT_S):
            console.print(typed.environment.mask(line))
    except KeyboardInterrupt:
        ignore_further_interrupts()
        job.stop_quietly()
        console.print("stopped")
        sys.exit(130)
    info = job.info()
    if info.has_missed_target:
        raise NotReached(f"job {job.submission_id} has ended without its target")
    if info.status is not ray_jobs.JobStatus.SUCCEEDED:
        ended = "was stopped by another" if info.status is ray_jobs.JobStatus.STOPPED else "failed"
        raise RunError(f"job {job.submission_id} {ended}")
