"""What `shoal run` adds to the environment of a job: read, checked, masked, and there in a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shoal.runs
from shoal.cli.commands.run_session import RunArguments
from shoal.cli.commands.runs import format_resume_command
from shoal.cluster.jobs import describe_upload
from shoal.cluster.runtime_env import JobEnvironment, format_options, parse_job_environment
from shoal.errors import ConfigError
from shoal_program import Program

if TYPE_CHECKING:
    from shoal.cluster.embedded_cluster import EmbeddedCluster

SECRET = "s3cret-value"
JOB = """
import os
import ray
import shoal.runs
from shoal.cluster.job_main import connect, expected_run_id

connect()
with shoal.runs.create("job", "", expected_run_id()):
    length = ray.get(ray.remote(num_cpus=0)(lambda: len(os.environ["MINE"])).remote())
    print("a worker sees", length, "characters", flush=True)
    if os.environ["FAILS"]:
        raise SystemExit("error: it fails with " + os.environ["MINE"])
"""


def write(folder: Path, text: str) -> Path:
    (folder / "env.yaml").write_text(text)
    return folder / "env.yaml"


def test_a_file_and_options_make_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "pip: [einops]\nenv_vars: {A: one, B: two}\nconfig: {setup_timeout_seconds: 60}")
    monkeypatch.setenv("FROM_HERE", "three")
    found = parse_job_environment(file, ["rich>=14"], "", ["B=2=2", "FROM_HERE"])
    assert found.fields == {"pip": ["einops", "rich>=14"], "config": {"setup_timeout_seconds": 60}}
    assert found.variables == {"A": "one", "B": "2=2", "FROM_HERE": "three"}
    assert found.has_own_python
    assert "three" not in repr(found)
    assert parse_job_environment(None, [], "", []) == JobEnvironment()
    image = parse_job_environment(None, [], "docker.example/train:1", ["A=1"])
    assert image.fields == {"image_uri": "docker.example/train:1"}


@pytest.mark.parametrize(
    ("text", "packages", "image", "variables", "problem"),
    [
        ("conda: base", ["einops"], "", [], r"runtime_env = \['conda', 'pip'\]: is refused by Ray: The 'pip' field"),
        (
            "pip: [einops]",
            [],
            "a/b:1",
            [],
            "is refused by Ray: The 'image_uri' field currently cannot be used together",
        ),
        ("pip: requirements.txt", ["einops"], "", [], r"has pip as 'requirements.txt'\. give all packages in the file"),
        ("working_dir: .", [], "", [], "has working_dir, which is the folder that the job is started in"),
        ("pips: [einops]", [], "", [], r"runtime_env = 'pips': is no field of Ray's runtime_env\. use conda"),
        ("[einops]", [], "", [], "holds no fields"),
        ("pip: [", [], "", [], "cannot be read"),
        ("env_vars: {A: 1}", [], "", [], "env_vars = '': is not a text for each name"),
        ("config: {}", [], "", ["NOT_SET_ANYWHERE"], "env = 'NOT_SET_ANYWHERE': is not set in this process"),
        ("config: {}", [], "", ["=value"], "env = '': has no name"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, text: str, packages: list[str], image: str, variables: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_job_environment(write(tmp_path, text), packages, image, variables)


def test_what_does_not_go_with_the_job_s_own_is_refused() -> None:
    image = parse_job_environment(None, [], "a/b:1", ["SHOAL_HOME=/mine"])
    with pytest.raises(ConfigError, match="env = 'SHOAL_HOME': is set by Shoal itself"):
        image.require_combinable({"SHOAL_HOME": "/home"}, is_uploaded=False)
    image.require_combinable({}, is_uploaded=False)
    with pytest.raises(ConfigError, match=r"image_uri = 'a/b:1': .* start its nodes from this image instead"):
        image.require_combinable({}, is_uploaded=True)


def test_the_command_of_the_record_has_names_of_variables_and_no_values() -> None:
    typed = format_options(Path("env.yaml"), ["rich>=14", "einops"], "", [f"MINE={SECRET}", "OTHER"])
    command = RunArguments("job", ("a=1",), 0, environment_options=typed).to_command_line()
    options = "--runtime-env env.yaml --pip 'rich>=14' --pip einops --env MINE --env OTHER"
    assert command == f"shoal run job {options} a=1"
    with shoal.runs.create("job", "resume: ''", command=command) as recorder:
        run = shoal.runs.load(recorder.id)
    assert format_resume_command(run) == f"shoal run job {options} resume={run.id} a=1"


def test_a_variable_reaches_workers_and_no_record(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "shoal", "run", str(tmp_path / "job.py"), "--plain", "--env", "MINE"]
    variables = {**os.environ, **cluster.environment, "MINE": SECRET}
    with Program([*command, "--env", "FAILS=1"], env=variables) as program:
        assert program.wait(600) == 1, program.said
        said = program.said
    assert f"a worker sees {len(SECRET)} characters" in said
    run = shoal.runs.list_runs(1)[0]
    assert run.command.endswith("--env MINE --env FAILS")
    assert SECRET not in said
    assert SECRET not in str(run.to_dict())
    assert "it fails with ***" in said


def test_an_upload_says_what_it_leaves_out_and_names_the_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".gitignore").write_text("data\n")
    for name in ("data", ".venv", "here"):
        Path(name).mkdir()
        Path(name, "a.csv").write_text("x" * 2000)
    assert ": 2 files, " in (said := describe_upload(tmp_path))
    assert said.endswith("; not data, by .gitignore or .rayignore")
    monkeypatch.setattr("ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE", 1000)
    with pytest.raises(ConfigError, match=r"working_dir = .*the largest are here/a.csv 2.0 KiB, .*\.rayignore"):
        describe_upload(tmp_path)
