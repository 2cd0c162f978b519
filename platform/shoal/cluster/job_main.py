"""The main function of every job: parse overrides, connect to the job's cluster, run, report errors.

Called by the files in `jobs/` and `serve_apps/`, and by flows that run as modules. A stop request (SIGTERM, as
`ray job stop` sends it) ends a job like Ctrl-C.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import shoal.runs
from shoal.cluster.cluster_handle import HIDE_GPUS, ClusterHandle, set_environment
from shoal.config import Spec, format_override, last_override
from shoal.config.field_help import FieldHelp, choose_main, format_field_help, list_field_help
from shoal.errors import ClusterError, ConfigError, NotReached, RunError, ShoalError
from shoal.home import home
from shoal.runs.event_messages import format_warning
from shoal.runs.json_lines import JSON, TEXT, log_json, write_json_lines
from shoal.runs.output_files import DRIVER, OutputCopier
from shoal.runs.record.opening import make_run_id
from shoal.runs.record.provenance import restore_secrets
from shoal.runs.run_kind import RunKind, find_kind

SpecT = TypeVar("SpecT", bound=Spec)
RUN_ID = "SHOAL_RUN_ID"
RETRIED = "SHOAL_RETRIED"  # whether this job may be another try of one with the same run id
PROGRAM = "SHOAL_PROGRAM"  # what was typed in place of `python FILE`, for `--help`
CHECK = "--check"
HELP = ("-h", "--help")
ALL = "--all"
ACTORS_INFERENCE = "SHOAL_ACTORS_INFERENCE"  # where the actors of `shoal run` have their policy: for the job's check


def job_main(
    spec: SpecT | Callable[[list[str]], SpecT],
    run: Callable[[SpecT, str], object],
    job: str,
    check: Callable[[SpecT], object] = lambda spec: None,
    translate: Callable[[list[str]], list[str]] = list,
    needs_cluster: bool = True,
    list_arguments: Callable[[SpecT], Iterable[FieldHelp]] = lambda spec: (),
) -> None:
    """Run `run(spec with overrides applied, job)` on the cluster of $RAY_ADDRESS; exits 3 on NotReached, 1 on another
    ShoalError or OSError.

    spec:    what the words change, or a function that makes it of them
    translate: makes overrides of the command line's words; may raise ShoalError
    needs_cluster: False where, without $RAY_ADDRESS, this process is enough
    list_arguments: further words, for `--help`

    `--help` prints the main fields, with `--all` every one. `--check` validates the overrides, runs `check` and exits.
    `resume=RUN` takes every field without an override from that run's record.
    """
    sys.path.append(os.getcwd())  # overrides may name modules there; the job's own folder is in it already
    try:
        words = translate(restore_secrets(sys.argv[1:]))
        fields = [word for word in words if word not in (CHECK, ALL, *HELP)]
        if (earlier := _find_earlier_try()) and not last_override(fields, "resume"):
            if isinstance(spec, Spec) and "resume" not in type(spec).model_fields:
                del os.environ[RUN_ID]  # it begins again, as another run
            else:
                fields.append(format_override("resume", earlier))
        if not isinstance(spec, Spec):
            chosen = spec(fields)
        elif resumed := last_override(fields, "resume"):
            chosen = type(spec).from_record(shoal.runs.load(resumed).spec, fields)  # without the secrets
        else:
            chosen = spec.override(fields)
        _require_kind(chosen, last_override(fields, "resume"))
        if not set(HELP).isdisjoint(words):
            print_help(chosen, list_arguments(chosen), has_all=ALL in words)
            return
        check(chosen)
        if CHECK in words:
            return
        has_json = getattr(chosen, "logs", TEXT) == JSON
        if has_json:
            write_json_lines()
        with ExitStack() as connected:
            if needs_cluster or os.environ.get("RAY_ADDRESS"):
                signal.signal(signal.SIGTERM, _raise_interrupt)
                connect(has_json=has_json)
                connected.callback(disconnect)
                _copy_output(fields)
            signal.signal(signal.SIGTERM, _raise_interrupt)  # ray.init replaces the handler
            run(chosen, job)
    except (ShoalError, OSError) as error:  # an OSError such as a full disk
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NotReached.EXIT_STATUS if isinstance(error, NotReached) else 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _copy_output(overrides: Sequence[str]) -> None:
    """Copy what this job and its workers on this host print into the folder of the run, if Ray has it in files: a
    cluster that ends takes them along."""
    import ray

    printed, job = Path(f"/proc/{os.getpid()}/fd/1").resolve(), ray.get_runtime_context().get_job_id()
    if not printed.match("job-driver-*.log"):  # it was not submitted: it prints where it was started
        return

    def find() -> Mapping[Path, str]:
        files = sorted(printed.parent.glob(f"worker-*-{job}-*.???"))
        workers = {path: f"worker-{path.stem.rpartition('-')[2]}" for path in files if path.suffix in (".out", ".err")}
        return {printed: DRIVER, **workers}

    resumed = last_override(overrides, "resume")
    run_id = shoal.runs.load(resumed).id if resumed else os.environ.setdefault(RUN_ID, make_run_id())
    copier = OutputCopier(home() / "runs" / run_id, find)
    atexit.register(copier.close)  # after the traceback of an error


def _require_kind(spec: Spec, resumed: str) -> None:
    """Raise ConfigError for a run of training where the job is one of the loop, and the reverse."""
    ours, kinds = find_kind(type(spec).model_fields), {RunKind.TRAINING, RunKind.LOOP}
    if not resumed or ours not in kinds:
        return
    theirs = shoal.runs.load(resumed).kind
    if ours is not theirs and theirs in kinds:
        problem = f"is a run of the kind {theirs.value}, and this job's are of the kind {ours.value}"
        raise ConfigError("resume", resumed, problem, f"`shoal runs {resumed}` has the command that resumes it")


def print_help(spec: Spec, others: Iterable[FieldHelp], *, has_all: bool) -> None:
    """What this program is, and the main fields of its spec with `others`, or every one."""
    main = sys.modules["__main__"]
    module = main.__spec__  # of `-m`
    ran = f"-m {module.name.removesuffix('.__main__')}" if module else sys.argv[0]
    program = os.environ.get(PROGRAM) or f"python {ran}"
    fields = list(list_field_help(spec))
    shown = fields if has_all else choose_main(fields, spec.main_fields)
    heading = "fields, with their present values, types and meanings"
    page = f"; docs/{spec.page} explains them" if spec.page else ""
    try:
        print(f"usage: {program} [field=value ...]\n")
        if about := (main.__doc__ or "").strip():
            print(f"{about}\n")
        print(f"{heading}:\n{format_field_help([*others, *shown])}")
        if len(shown) < len(fields):
            print(f"\n{len(fields) - len(shown)} further fields: {program} --help --all{page}")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the interpreter flushes once more as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def expected_run_id() -> str | None:
    """The run id that the submitter of this job expects ($SHOAL_RUN_ID); None when any will do."""
    return os.environ.get(RUN_ID)


def _find_earlier_try() -> str:
    """The run that an earlier try of this job has begun, where it is tried again ($SHOAL_RETRIED); "" for none."""
    with suppress(RunError):  # this is the first try
        if (run_id := expected_run_id()) and os.environ.get(RETRIED):
            return shoal.runs.load(run_id).id
    return ""


def connect(*, has_json: bool = False) -> None:
    """Connect this process to the cluster of $RAY_ADDRESS. Raises ClusterError.

    Of a cluster that was started without HIDE_GPUS, all workers of this process get it.

    has_json: the log of this process and of its workers is JSON
    """
    import ray  # a third of a second: wrong overrides fail before it

    from shoal.ray_call import NAMESPACE

    if not os.environ.get("RAY_ADDRESS"):
        remedy = "start it with `shoal run`, or with `ray job submit` on a cluster that is up"
        raise ClusterError(f"a job runs on a cluster, and $RAY_ADDRESS is not set: {remedy}")
    missing = {name: value for name, value in HIDE_GPUS.items() if name not in os.environ}
    try:
        ray.init(
            address=os.environ["RAY_ADDRESS"],
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": missing} if missing else None,
            logging_config=ray.LoggingConfig(encoding="JSON", log_level="WARNING") if has_json else None,
        )
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"no Ray answers at {os.environ['RAY_ADDRESS']}: {error}") from error
    if has_json:
        log_json()  # in place of Ray's handler, of this process


@contextmanager
def join_cluster(cluster: ClusterHandle) -> Iterator[None]:
    """This process as a driver of `cluster`. Raises ClusterError.

    Afterwards its environment, its handler of SIGTERM and Ray's settings are as before, for the next cluster.
    """
    rays = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT", ""), "RAY_CLIENT_MODE": "0"}  # Ray sets them itself
    is_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with set_environment({**cluster.environment, **rays}):
            _read_ray_settings()
            try:
                connect()
                if is_main and not callable(handler):  # Ray's exits with 15
                    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
                yield
            finally:
                disconnect()
    finally:
        _read_ray_settings()
        if is_main:
            signal.signal(signal.SIGTERM, handler)  # ray.init replaces it


def _read_ray_settings() -> None:
    """Let Ray read from the environment what it reads only when it is imported."""
    from ray import _raylet
    from ray._private import ray_constants as ray_settings

    # Whether 127.0.0.1 stays 127.0.0.1.
    name, default = ray_settings.ENABLE_RAY_CLUSTERS_ENV_VAR, not ray_settings.IS_WINDOWS_OR_OSX
    ray_settings.ENABLE_RAY_CLUSTER = ray_settings.env_bool(name, default)
    _raylet.Config.initialize("")  # type: ignore[attr-defined] # authentication
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def is_connected() -> bool:
    """Whether this process is a driver already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def find_dashboard_url() -> str | None:
    """The dashboard of the cluster that this process is a driver of; None without one."""
    if not is_connected():
        return None
    from ray._private.worker import get_dashboard_url

    return f"http://{get_dashboard_url()}"


def disconnect() -> None:
    """Disconnect this process. Idempotent."""
    import ray

    ray.shutdown()


def print_too(record: Callable[..., None]) -> Callable[..., None]:
    """What records an event, and prints its message."""

    def record_and_print(kind: str, **details: object) -> None:
        record(kind, **details)
        if message := format_warning(kind, details):
            print(message, flush=True)

    return record_and_print


def _raise_interrupt(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore further ones during the cleanup
    raise KeyboardInterrupt
