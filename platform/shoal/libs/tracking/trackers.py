"""MLflow, Weights & Biases and Trackio, each called through its own library.

Called by the follower. A library is imported when its tracker is made. Its own environment variables configure it.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import MASKED
from shoal.extend.runs import Status, Tracker, is_secret_name
from shoal.home import file_lock, home
from shoal.yaml_text import parse_yaml

if TYPE_CHECKING:
    from shoal.extend.runs import MetricValue, Run

PROJECT = "shoal"  # unless the tracker's own variable names another
_MAKING_S = 60.0  # of a database, by another process
_ANSWER_S = 20  # for a server, by default, before the attempt has failed


class MlflowTracker(Tracker):
    """A run of MLflow, found again by its id or its tag `shoal.run`. The server ignores a value that it has already."""

    requires = "mlflow"
    _ENDS: Mapping[Status, str] = {Status.FINISHED: "FINISHED", Status.NOT_REACHED: "FINISHED", Status.FAILED: "FAILED"}
    _BATCH = 1000  # values in a request, the most that MLflow takes
    _PARAMETERS = 100
    _MAX_CHARS = 500  # of a parameter: servers of MLflow 1 refuse longer ones

    def __init__(self) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            _make_database(home() / "mlflow.db")
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{home() / 'mlflow.db'}"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_ANSWER_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the follower tries again
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._id = ""

    def begin(self, run: Run, tracker_run: str) -> tuple[str, str]:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = str(known.experiment_id if known else self._client.create_experiment(name))
        self._id = tracker_run or self._find_run(experiment, run)
        before = self._client.get_run(self._id).data.params
        parameters = {
            self._clean(path): str(each)[: self._MAX_CHARS] for path, each in list_parameters(run.spec).items()
        }
        added = [Param(path, each) for path, each in parameters.items() if path not in before]  # they cannot change
        for start in range(0, len(added), self._PARAMETERS):
            self._client.log_batch(self._id, params=added[start : start + self._PARAMETERS])
        self._client.update_run(self._id, status="RUNNING")
        server = os.environ["MLFLOW_TRACKING_URI"]
        page = f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
        return self._id, page if server.startswith("http") else server

    def send(self, values: Sequence[MetricValue]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(self._clean(each.name), each.value, int(each.time * 1000), each.step) for each in values]
        for start in range(0, len(metrics), self._BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._BATCH])

    def finish(self, run: Run) -> None:
        for model in list_models(run):
            self._client.set_tag(self._id, f"shoal.model.{self._clean(model.partition('@')[0])}", model)
        ended_ms = None if run.finished_at is None else int(run.finished_at * 1000)
        self._client.set_terminated(self._id, self._ENDS.get(run.status, "KILLED"), ended_ms)

    def _find_run(self, experiment: str, run: Run) -> str:
        runs = self._client.search_runs([experiment], f"tags.`shoal.run` = '{run.id}'", max_results=1)
        if runs:
            return str(runs[0].info.run_id)
        tags = {"shoal.run": run.id, **list_facts(run)}
        if run.git_revision:
            tags["mlflow.source.git.commit"] = run.git_revision
        created = self._client.create_run(experiment, int(run.created_at * 1000), tags, run_name=run.id)
        return str(created.info.run_id)

    @staticmethod
    def _clean(name: str) -> str:
        """The name with only such characters as MLflow takes."""
        return re.sub(r"[^\w\-. /]", "_", posixpath.normpath(name)).strip("./") or "_"


def _make_database(path: Path) -> None:
    """Make MLflow's database unless it is there. MLflow can neither read nor complete one with some of its tables, as a
    killed process leaves it."""
    with file_lock(path.with_suffix(".lock"), _MAKING_S):
        if path.exists():
            return
        from mlflow import MlflowClient

        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        MlflowClient(f"sqlite:///{draft}").search_experiments()
        draft.replace(path)


class WandbTracker(Tracker):
    """A run of Weights & Biases, with Shoal's id.

    W&B drops a value of an earlier step than its own counter, which a restarted run would log: the steps are a metric
    of their own, the x-axis of all others. The library uploads in the background, from files in the run's folder.
    """

    requires = "wandb"
    STEP, TIME = "shoal/step", "shoal/time"

    def begin(self, run: Run, tracker_run: str) -> tuple[str, str]:
        import wandb

        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_ANSWER_S))
        settings = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._created_at = run.created_at
        try:
            self._run = wandb.init(
                id=run.id,
                name=run.id,
                dir=os.environ.get("WANDB_DIR", run.folder),
                job_type=run.kind.value,
                resume="allow",
                settings=settings,
            )
        except Exception:  # of the network, of credentials: until then its service holds the run's id as used
            wandb.teardown()
            raise
        self._run.config.update({**list_parameters(run.spec), **list_facts(run)}, allow_val_change=True)
        self._run.define_metric(self.STEP, hidden=True)
        self._run.define_metric("*", step_metric=self.STEP)
        return run.id, self._run.url or f"wandb sync {self._run.settings.sync_dir}"

    def send(self, values: Sequence[MetricValue]) -> None:
        for (at, step), group in itertools.groupby(values, key=lambda each: (each.time, each.step)):
            known = {self.STEP: step, self.TIME: at - self._created_at}
            self._run.log({**known, **{each.name: each.value for each in group}})

    def finish(self, run: Run) -> None:
        models = (*(self._run.tags or ()), *(model[:64] for model in list_models(run)))
        self._run.tags = tuple(dict.fromkeys(models))
        self._run.summary["shoal/status"] = run.status.value
        self._run.finish(exit_code=0 if run.status.is_complete else 1)


class TrackioTracker(Tracker):
    """A run of Trackio, found again by its name, which is Shoal's id."""

    requires = "trackio"

    def begin(self, run: Run, tracker_run: str) -> tuple[str, str]:
        import trackio

        self._trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        config = {**list_parameters(run.spec), **list_facts(run)}
        trackio.init(
            project=project,
            name=run.id,
            config=config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return run.id, f"trackio show --project {project}"

    def send(self, values: Sequence[MetricValue]) -> None:
        for (_, step), group in itertools.groupby(values, key=lambda each: (each.time, each.step)):
            self._trackio.log({each.name: each.value for each in group}, step=step)

    def finish(self, run: Run) -> None:
        self._trackio.finish()


def list_parameters(spec: str) -> dict[str, object]:
    """The fields of a recorded spec (YAML) by their paths, as `optimizer.learning_rate`, without secrets.

    Values are texts, numbers, booleans or None; a list is its JSON.
    """

    def flatten(path: str, value: object) -> Iterable[tuple[str, object]]:
        if isinstance(value, Mapping) and value:
            for name, each in value.items():
                yield from flatten(f"{path}.{name}" if path else str(name), each)
        elif MASKED not in str(value) and not is_secret_name(path):
            is_plain = value is None or isinstance(value, str | int | float)
            yield path, value if is_plain else json.dumps(value, default=str)

    fields = parse_yaml(spec)
    return dict(flatten("", fields)) if isinstance(fields, dict) else {}


def list_facts(run: Run) -> dict[str, str]:
    """What a reader of the tracker may search for, besides the spec."""
    facts = {"job": run.job, "kind": run.kind.value, "host": run.host, "git": run.git_revision or ""}
    return {f"shoal.{name}": each for name, each in facts.items() if each}


def list_models(run: Run) -> list[str]:
    """The registered models, as NAME@VERSION."""
    return [f"{name}@{version}" for name, version, *_ in run.list_models()]
