"""Mechanisms that have one place: a text that only these files of the package may have."""

import re

import pytest

from contracts.test_imports import FILES, PACKAGE

PLACES = {
    "the families of Prometheus, where they are counted": (
        r'"(nv_inference|shoal)_\w+_(count|total|seconds|bytes|rows)"',
        {
            *("serve/messages/counts.py", "serve/messages/replica_report.py", "runs/ray_gauges.py"),
            "libs/language/served/text_statistics.py",
        },
    ),
    "whether a shadow disagreed: counted, declared, judged, and shown": (
        r"\bdisagreed\b",
        {
            *("serve/messages/counts.py", "serve/replica/model_statistics.py", "serve/replica/shadow.py"),
            *("serve/controller/canary_guard.py", "client/endpoint_status.py", "cli/display/serve_display.py"),
        },
    ),
    "an exception becomes the error of a request": (
        r"this request failed: \{type\(error\)",
        {"serve/messages/model_errors.py"},
    ),
    "a model answers an inference, which is traced and encoded": (
        r"\.record_prediction\(",
        {"serve/protocol/pipeline.py"},
    ),
    "what a model is: for REST, and for gRPC by REST's answer": (
        r"import [^)]*build_model_config",
        {"serve/http/admin.py"},
    ),
    "the newest version of a run, whose number a replica never sees: the controller's plans": (
        r"\bNEWEST\b",
        {
            "serve/messages/desired_state.py",
            *(f"serve/controller/{name}.py" for name in ("live_control", "rollout")),
        },
    ),
    "another replica answers a client": (r"_transport\.relay\(", {"serve/replica/cold_models.py"}),
    "an inference goes through its pipeline: HTTP's and gRPC's": (
        r"await answer_inference\(",
        {"serve/http/app.py", "libs/grpc/service.py"},
    ),
    "a parameter of a function becomes an option of click": (
        r"click\.(option|argument|Option|Argument)\(",
        {"cli/support/verbs.py", "cli/support/options.py", "cli/commands/actor.py", "cli/__init__.py"},
    ),
    "the record of a run is read": (
        r"FROM (runs|events|metrics|endpoints)\b",
        {
            *("runs/curves.py", "runs/run_reader.py"),
            *(f"runs/record/{name}.py" for name in ("database", "opening", "removal", "metric_summaries")),
            *(f"runs/record/{name}.py" for name in ("store_copies", "store_mirror")),
        },
    ),
    "the record of a run and its report: of all, but of trials and of those that end in ways of their own": (
        r"runs\.recording\(",
        {
            *("flows/run_flow.py", "flows/training.py", "train/launch/local.py"),
            *("libs/sweep/trial.py", "libs/sweep/loop_trial.py"),
        },
    ),
    "a file of fields is read": (r"UnicodeDecodeError, yaml\.YAMLError", {"yaml_text.py"}),
    "the queue of a run is made, and with it the gateway's half of a loop": (
        r"\bExperienceQueue\(",
        {"rl/gateway/gateway.py"},
    ),
    "a gateway's socket is bound": (
        r"\bbind_router\(",
        {"rl/gateway/connections.py", "rl/gateway/zmq_listener.py"},
    ),
    "a hello is held against the gateway's token": (r"hello\.token", {"rl/gateway/sessions.py"}),
    "the head of a run in a store is replaced": (r"\.replace\(head_key\(", {"runs/record/store_mirror.py"}),
    "an episode is open at the gateway": (r"\bRemoteEpisode\(", {"rl/gateway/remote_episodes.py"}),
    "processes of ours prove a secret to each other": (r"\bdeliver_challenge\b", {"channel/connection.py"}),
    "the memory of another process is opened": (r"/proc/\{self.pid", {"channel/memory.py"}),
    "arrays and tensors are kept out of a pickle": (
        r"\breducer_override\(",
        {"channel/packing.py", "data/workers/shm_transfer.py"},
    ),
    "a missing library is told with its extra": (r"'CHECKOUT\[\{", {"errors.py"}),
    "a command says what it waits for": (r'name="waits"', {"runs/waits.py"}),
    "which curves a run is judged by: of any kind, and of those of libraries": (
        r"\bcriteria=",
        {f"libs/{name}.py" for name in ("agents/report", "console/run_data", "population/report", "stream/report")},
    ),
    "a body that a browser sends to the console is read": (r"request\.stream\(\)", {"libs/console/answers.py"}),
    "a rank takes a step to be measured: of a real model, and of a fake one": (
        r"\brun_rank\(",
        {f"libs/planning/predict/{name}.py" for name in ("rank_step", "fake_step", "predict")},
    ),
}


@pytest.mark.parametrize("mechanism", PLACES)
def test_a_mechanism_has_one_place(mechanism: str) -> None:
    pattern, places = PLACES[mechanism]
    found = {str(path.relative_to(PACKAGE)) for path in FILES if re.search(pattern, path.read_text())}
    assert found == places
