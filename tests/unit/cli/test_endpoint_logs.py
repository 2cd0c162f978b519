"""Which of Ray's files are an endpoint's, and which of their lines are shown."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.support.endpoint_logs import EndpointLogs


def test_the_lines_of_an_endpoint_are_found_by_its_actors_and_once(tmp_path: Path) -> None:
    logs = tmp_path / "ray/session_2026-01-01_1/logs"
    logs.mkdir(parents=True)
    (logs / "job-driver-run1.log").write_text("Running entrypoint for job run1: python\nserving m@1\n")
    (logs / "job-driver-run2.log").write_text("serving other\n")
    actors = {
        "worker-a-01-11.err": "ServeReplica:shop:replica\nm: version 1 failed (cf17)",
        "worker-b-01-12.out": "ServeReplica:shop2:replica\nof another",
        "worker-c-01-13.err": "EndpointController:shop\nthe registry is gone",
        "worker-d-01-14.err": "ServeController\nof all",
    }
    for name, text in actors.items():
        (logs / name).write_text(f":job_id:01\n:actor_name:{text}\n")
    reader = EndpointLogs(tmp_path, "shop", "run1")
    assert sorted(reader.read_new_lines()) == [
        ("controller", "the registry is gone"),
        ("job", "serving m@1"),
        ("replica-11", "m: version 1 failed (cf17)"),
    ]
    with (logs / "worker-a-01-11.err").open("a") as file:
        file.write("more\nhalf a li")
    (logs / "worker-e-01-15.out").write_text(":job_id:01\n:actor_name:ServeReplica:shop:replica\nanother replica\n")
    assert reader.read_new_lines() == [("replica-11", "more"), ("replica-15", "another replica")]
    assert reader.read_new_lines() == []
