"""Each alert rule names what is exported, rings for the fault that it is about, and is silent for a healthy system."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.serve.protocol.prometheus import METRICS
from unit.serve.test_grafana import family, labels, list_recorded, names

RULES = Path(__file__).parents[3] / "docs" / "prometheus" / "shoal-alerts.yaml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
OF_RUNS = {"run_events_total", "run_checkpoint_timestamp_seconds"}
M = 'model="m",replica="a"'
# By alert: series that make it ring within three hours, and the labels of the alert beside its severity.
FAULTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ShoalVersionFails": (
        {
            f'shoal_requests_total{{{M},version="2",status="200"}}': "0+50x180",
            f'shoal_requests_total{{{M},version="2",status="500"}}': "0+5x180",
            f'shoal_requests_total{{{M},version="1",status="200"}}': "0+500x180",
        },
        {"model": "m", "version": "2"},
    ),
    "ShoalEndpointRejects": (
        {
            f'shoal_requests_total{{{M},status="429"}}': "0+30x180",
            f'shoal_requests_total{{{M},version="1",status="200"}}': "0+70x180",
        },
        {"model": "m"},
    ),
    "ShoalQueueIsSlow": (
        {
            f'shoal_queue_duration_seconds_bucket{{{M},le="1.0"}}': "0+90x180",
            f'shoal_queue_duration_seconds_bucket{{{M},le="2.5"}}': "0+100x180",
            f'shoal_queue_duration_seconds_bucket{{{M},le="+Inf"}}': "0+100x180",
        },
        {"model": "m"},
    ),
    "ShoalReplicaIsNotReady": (
        {'shoal_replica_ready{replica="a"}': "0x180", 'shoal_replica_ready{replica="b"}': "1x180"},
        {"replica": "a"},
    ),
    "ShoalCertificateExpires": ({'shoal_certificate_expires_timestamp_seconds{replica="a"}': "864000x180"}, {}),
    "ShoalCandidateDisagrees": (
        {
            f'shoal_shadow_compared_total{{{M},version="2"}}': "0+100x180",
            f'shoal_shadow_disagreed_total{{{M},version="2"}}': "0+10x180",
        },
        {"model": "m", "version": "2"},
    ),
    "ShoalTrainingStalls": ({'ray_shoal_training_train_step{run="r"}': "0+10x60 600x120"}, {"run": "r"}),
    "ShoalLoopStalls": ({'ray_shoal_loop_learner_updates{run="r"}': "0+10x60 600x120"}, {"run": "r"}),
    "ShoalNoActors": ({'ray_shoal_loop_actors_connected{run="r"}': "4x60 0x120"}, {"run": "r"}),
    "ShoalSegmentsAreDropped": (
        {
            'ray_shoal_loop_segments_received{run="r"}': "0+100x180",
            'ray_shoal_loop_segments_dropped{run="r"}': "0+10x180",
        },
        {"run": "r"},
    ),
    "ShoalValuesAreNotFinite": (
        {'ray_shoal_run_events_total{run="r",kind="not_finite train/loss"}': "_x175 1x5"},
        {"run": "r"},
    ),  # its first one
    "ShoalCheckpointIsOld": ({'ray_shoal_run_checkpoint_timestamp_seconds{run="r"}': "600x180"}, {"run": "r"}),
    "ShoalWritesFail": (
        {'ray_shoal_run_events_total{run="r",kind="upload_failed"}': "1x170 2x10"},
        {"run": "r", "kind": "upload_failed"},
    ),
    "ShoalWorkersAreLost": (
        {'ray_shoal_run_events_total{run="r",kind="learner_restarted"}': "1x150 2x10 6x20"},
        {"run": "r"},
    ),
    "ShoalRunFails": ({'ray_shoal_run_events_total{run="r",kind="failed"}': "_x179 1"}, {"run": "r"}),
}
HEALTHY = {
    f'shoal_requests_total{{{M},version="1",status="200"}}': "0+500x180",
    f'shoal_requests_total{{{M},version="1",status="500"}}': "0+1x180",
    f'shoal_queue_duration_seconds_bucket{{{M},le="0.1"}}': "0+100x180",
    f'shoal_queue_duration_seconds_bucket{{{M},le="+Inf"}}': "0+100x180",
    'shoal_replica_ready{replica="a"}': "1x180",
    'shoal_certificate_expires_timestamp_seconds{replica="a"}': "8640000x180",
    'ray_shoal_training_train_step{run="r"}': "0+10x180",
    'ray_shoal_loop_learner_updates{run="l"}': "0+10x180",
    'ray_shoal_loop_actors_connected{run="l"}': "4x180",
    'ray_shoal_loop_segments_received{run="l"}': "0+100x180",
    'ray_shoal_loop_segments_dropped{run="l"}': "0+1x180",
    'ray_shoal_run_checkpoint_timestamp_seconds{run="r"}': "0+60x180",
    'ray_shoal_run_events_total{run="r",kind="checkpoint_failed"}': "1x180",
    'ray_shoal_run_events_total{run="r",kind="finished"}': "_x179 1",
    'ray_shoal_run_events_total{run="l",kind="not_finite lag/max"}': "_x170 1x10",
}


@pytest.mark.parametrize("alert", ALERTS)
def test_a_rule_names_what_is_exported_and_says_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    for name in names(rule["expr"]):
        assert family(name) in METRICS
        grouped = {each.strip() for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for each in group.split(",")}
        assert grouped <= labels()[family(name)] | {"le", "replica"}
    for kind, metric in re.findall(r"ray_shoal_(training|loop|run)_(\w+)", rule["expr"]):
        assert f"run_{metric}" in OF_RUNS if kind == "run" else metric in list_recorded(), metric
    for event in re.findall(r'kind=~?"([^"]+)"', rule["expr"]):
        kinds = {each for each in event.split("|") if "not_finite" not in event}
        assert kinds <= list_recorded() | {"gateway_restarted", "learner_restarted"}, event
    assert set(rule["annotations"]) == {"summary", "remedy"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool: apt install prometheus")
def test_each_rule_rings_for_its_fault_alone(tmp_path: Path) -> None:
    assert set(FAULTS) == set(ALERTS)

    def describe(series: dict[str, str], ringing: list[tuple[str, dict[str, str]]]) -> dict[str, Any]:
        samples = []
        for alert, found in ringing:
            named = {
                "alertname": alert,
                "alertstate": "firing",
                "severity": ALERTS[alert]["labels"]["severity"],
                **found,
            }
            written = ",".join(f'{name}="{value}"' for name, value in named.items())
            samples.append({"labels": f"ALERTS{{{written}}}", "value": 1})
        asked = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "3h", "exp_samples": samples}
        listed = [{"series": name, "values": values} for name, values in series.items()]
        return {"interval": "1m", "input_series": listed, "promql_expr_test": [asked]}

    tests = [describe(HEALTHY, []), *(describe(series, [(alert, found)]) for alert, (series, found) in FAULTS.items())]
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "alerts.test.yaml"
    path.write_text(yaml.safe_dump(content))
    for words in (["check", "rules", str(RULES)], ["test", "rules", str(path)]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
