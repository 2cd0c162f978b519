"""What is shown of a run of agents: on a terminal, in a log file, in its report."""

import json
from pathlib import Path
from typing import Any

import pytest
from agents_rig import chat, end, find_url, make_spec, open_run, open_session, read_answer, save_model
from test_token_tree import make_tokenizer

from shoal import runs
from shoal.cli.commands.runs import format_resume_command
from shoal.cli.display import run_view
from shoal.libs.agents.display import AgentsView, make_view
from shoal.libs.agents.metrics import AgentsMetrics
from shoal.libs.agents.report import PANELS, build_panels
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.console.run_data import describe_run
from shoal.runs import RunKind
from typed import draw_plain

GATEWAY: dict[str, Any] = {
    "counted_at": 100.0,
    "sessions": {
        "url": "http://127.0.0.1:1",
        **{"open": 3, "waiting": 1, "opened": 1_244, "ended": 1_234, "failed": 7, "steps": 10},
        **{"answers": 2_000, "branches": 2, "tokens/sampled": 5_000, "tokens/learned": 4_000, "drops/failed": 7},
        **{"reward": 0.25, "length": 12.5, "cut_fraction": 0.05, "no_signal_fraction": 0.125, "window": 256},
    },
}
LEARNER: dict[str, Any] = {
    "updates": 10,
    "metrics": {
        **{"agents/entropy": 1.5, "agents/token_lag_mean": 0.5, "agents/token_lag_max": 1.0, "agents/reward": 0.9},
        **{"agents/logprob_diff_max": 2e-5, "agents/clip_share": 0.01},
    },
}


def record(run_id: str, spec: AgentsSpec, *, learner: dict[str, Any] | None = None, **counts: Any) -> runs.Run:
    """A run that has made ten steps, and ten more in 20 seconds."""
    metrics = AgentsMetrics()
    with runs.create("agents", spec.to_record(), run_id, kind=RunKind("agents")) as run:
        run.record_event("gateway_ready")
        run.log(10, metrics.compute(GATEWAY, LEARNER))
        changed = {"steps": 20, "tokens/sampled": 9_000, "tokens/learned": 6_000, "reward": 0.75, **counts}
        gateway = {"counted_at": 120.0, "sessions": GATEWAY["sessions"] | changed}
        run.log(20, metrics.compute(gateway, {"updates": 20, "metrics": LEARNER["metrics"] | (learner or {})}))
    return runs.load(run_id)


def view(run: runs.Run) -> AgentsView:
    seen = run_view.make_view(run, None)
    assert isinstance(seen, AgentsView)
    return seen


@pytest.mark.parametrize("width", [80, 100])
def test_all_that_matters_is_on_the_picture(width: int) -> None:
    shown = view(record("one", AgentsSpec(model="m", max_steps=40)))
    lines = draw_plain(shown.render(), width).splitlines()
    assert {len(line) for line in lines} == {width}
    text = " ".join(" ".join(lines).replace("│", "").split())
    for words in (
        *("step 20", "of 40", "40.0 s to go", "reward 0.75", "open 3", "waiting 1", "ended 1,234", "failed 7"),
        *("length 12.5", "cut 5%", "without signal 12.5%", "token lag 0.5", "largest lag 1", "log p differs 2e-5"),
        *("tokens/s sampled 200", "learnt 100", "drops", "failed 7"),
    ):
        assert words in text, words
    line = shown.format_plain_line()
    assert "learning: step 20, reward 0.75, open 3" in line
    assert (shown.bad, shown.notes) == (set(), ())


@pytest.mark.parametrize(
    ("metric", "fields"),
    [
        ("sessions/cut_fraction", {"cut_fraction": 0.3}),
        ("sessions/no_signal_fraction", {"no_signal_fraction": 0.6}),
        ("sessions/sampling_overridden", {"sampling_overridden": 1}),
        ("agents/token_lag_max", {"learner": {"agents/token_lag_max": 2.0}}),
        ("agents/logprob_diff_max", {"learner": {"agents/logprob_diff_max": 0.01}}),
    ],
)
def test_what_is_bad_is_marked_with_what_helps(metric: str, fields: dict[str, Any]) -> None:
    run = record("one", AgentsSpec(model="m"), **fields)
    shown = view(run)
    assert (shown.bad, len(shown.notes)) == ({metric}, 1)
    assert shown.notes[0] in " ".join(draw_plain(shown.render(), 150).split())
    (panel,) = build_panels(run)  # of the report and the console
    assert panel.rows == [(metric, (shown.format(metric), "warn"), shown.notes[0])]


def test_half_precision_has_no_bound_for_log_probabilities() -> None:
    spec = AgentsSpec.parse({"model": "m", "algorithm": {"name": "grpo", "precision": "bf16"}})
    assert not view(record("one", spec, learner={"agents/logprob_diff_max": 0.01})).bad


def test_a_run_without_sessions_says_what_it_waits_for() -> None:
    with runs.create("agents", AgentsSpec(model="m").to_record(), "one", kind=RunKind("agents")) as run:
        assert "starting the gateway" in make_view(runs.load("one"), None, ()).format_plain_line()
        run.record_event("gateway_ready")
        shown = make_view(runs.load("one"), None, ())
        assert "waiting for sessions" in draw_plain(shown.render())


def test_a_run_is_judged_by_the_reward_of_all_sessions() -> None:
    run = record("one", AgentsSpec(model="m", target_reward=0.8))
    assert run.best() == ("sessions/reward", 0.75)  # a batch has a higher one, of what is learnt alone
    described = describe_run(run)
    assert (described["criteria"][0], described["targets"]) == ("sessions/reward", {"sessions/reward": 0.8})
    assert not any(criterion.startswith(PANELS.folded) for criterion in PANELS.criteria)


def test_a_run_is_resumed_by_the_command_that_is_shown() -> None:
    command = "shoal run agents model=m max_steps=40"
    with runs.create("agents", AgentsSpec(model="m").to_record(), "one", kind=RunKind("agents"), command=command):
        assert format_resume_command(runs.load("one")) == "shoal run agents resume=one model=m max_steps=40"


def test_the_report_has_answers_of_several_versions(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", make_tokenizer())
    with runs.create("agents", make_spec(model).to_record(), "one", kind=RunKind("agents")):
        run = runs.load("one")
        assert build_panels(run) == []
        with open_run(make_spec(model), run.folder) as loop:
            url = find_url(loop)
            answers = []
            for number in range(4):
                session = open_session(
                    url, group=f"g{number // 2}", group_size=2, task={"messages": [{"content": "ab"}]}
                )
                answers.append(read_answer(chat(session, "ab")))
                end(url, session, reward=number % 2)
            counts = loop.gateway.stats()["sessions"]
        (panel,) = build_panels(run)
    assert [row[:3] for row in panel.rows] == [("1", "ab", "1"), ("1", "ab", "0")]
    assert panel.rows[0][3].startswith(answers[1].strip())
    json.dumps(panel.rows)
    assert (counts["answers"], counts["cut_fraction"], counts["no_signal_fraction"]) == (4, 1.0, 0.0)
    assert counts["length"] == 6
