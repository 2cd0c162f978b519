"""`shoal batch-predict`: a registered model over a file or folder, on the running cluster or on a new one.

Parse, call, print: the job `shoal.libs.batch_predict.flow` does the work.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import click
from rich.console import Console

from shoal.config import format_override
from shoal.errors import ConfigError, RunError
from shoal.extend.cli import (
    Address,
    JobLogReader,
    ModelName,
    Overrides,
    Positive,
    Texts,
    describe_failure,
    follow_output,
    ignore_further_interrupts,
    job_environment,
    make_literal_console,
    verb,
)
from shoal.extend.cluster import (
    ClusterHandle,
    JobHandle,
    JobStatus,
    find_cluster,
    new_submission_id,
    start_cluster,
    submit,
)
from shoal.extend.runs import escape_text, format_masked_command, make_command_variable, make_run_id
from shoal.libs.batch_predict.flow import BatchPredictSpec, check
from shoal.store import is_url

POLL_S = 0.2
MODULE = "shoal.libs.batch_predict.flow"


@verb("batch-predict", work="predicting")
def batch_predict(
    model: ModelName,
    source: Annotated[str, "INPUT"],
    output: Annotated[str, "OUTPUT"],
    overrides: Overrides = (),
    *,
    columns: Annotated[Texts, "--columns [X=]A,B,C", "The columns of an input."] = (),
    text: Annotated[
        str | None, "--text COLUMN", "Of a language model: the texts, or lists of messages, to answer."
    ] = None,
    keep: Annotated[str | None, "--keep A,B", "The columns of the input to keep.  [default: all]"] = None,
    workers: Annotated[Positive | None, "Processes with the model.  [default: the CPUs but one]"] = None,
    num_gpus: Annotated[
        float | None,
        click.FloatRange(min=0),
        "GPUs, or a fraction of one, for each.  [default: 0; with options.device=cuda an even share]",
    ] = None,
    skip_errors: Annotated[
        bool, "Give a row that the model fails on, or that lacks a value, the reason in the column `error`."
    ] = False,
    address: Address = None,
) -> None:
    """Predict every row of INPUT, a file of Parquet, CSV or JSON lines (.jsonl) or a folder of them, and write Parquet
    into the folder OUTPUT.

    The output has the columns of the input, the model's outputs and its version, in the order of the input. It appears
    complete or not at all. Either may be in a bucket: s3://BUCKET/PREFIX, gs://... or az://... Needs no endpoint;
    without a cluster (see `shoal up`), one is started for this command. On a remote cluster, model and paths are those
    of its hosts.

    \b
    Examples:
      shoal batch-predict tabular@champion patients.csv predicted --columns radius,texture,area
      shoal batch-predict fashion images/ predicted --keep id --workers 4
      shoal batch-predict fashion s3://my-bucket/images s3://my-bucket/predicted
      shoal batch-predict fashion@3 images.parquet predicted options.precision=bf16 --skip-errors
      shoal batch-predict smollm@champion questions.jsonl answers --text prompt generate.max_tokens=60
    """
    paths = {"input": source, "output": output}
    paths = {field: path if is_url(path) else str(Path(path).resolve()) for field, path in paths.items()}
    for field, path in paths.items():
        if escape_text(path) != path:  # the path becomes a word of the job's command, and enters the record
            raise ConfigError(field, path, "is no text", "give files and folders names in UTF-8")
    options = {
        "columns": list(columns) or None,
        "text": text or None,
        "keep": [each.strip() for each in keep.split(",")] if keep else None,
        "workers": workers,
        "num_gpus": num_gpus,
        "skip_errors": skip_errors or None,
    }
    fields = [format_override(field, value) for field, value in {"model": model, **paths}.items()] + list(overrides)
    fields += [format_override(field, value) for field, value in options.items() if value is not None]
    spec, cluster = BatchPredictSpec().override(fields), find_cluster(address)
    if cluster is None or cluster.is_local:
        check(spec)  # before a cluster is started
    console = make_literal_console()
    with ExitStack() as stack:
        try:
            _run(fields, cluster, console, stack)
        except KeyboardInterrupt:
            ignore_further_interrupts()
            stack.close()
            console.print("stopped: nothing was written")
            sys.exit(130)


def _run(fields: list[str], cluster: ClusterHandle | None, console: Console, stack: ExitStack) -> None:
    if cluster is None:
        console.print("starting a Ray cluster for this run ...")
        embedded = start_cluster()
        stack.callback(embedded.stop)
        cluster = embedded
    command = format_masked_command(["shoal", *sys.argv[1:]])
    job = JobHandle(cluster, new_submission_id())
    stack.callback(job.stop_quietly)  # before the submission: an interruption may come at any moment
    if cluster.is_local:
        environment = job_environment(make_run_id(), command)
        python = sys.executable
        folder = None
    else:
        # the folder of hooks
        environment = make_command_variable(command)
        python = "python"
        folder = Path.cwd()
    words = [python, "-m", MODULE, *fields]
    submit(cluster, words, env=environment, working_dir=folder, submission_id=job.submission_id)
    for line in follow_output(JobLogReader(job).read_new_lines, lambda: job.poll_outcome() is not None, POLL_S):
        console.print(line)
    if (outcome := job.status()) is not JobStatus.SUCCEEDED:
        raise RunError(describe_failure(job, "batch prediction", outcome))
