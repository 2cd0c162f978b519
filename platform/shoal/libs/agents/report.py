"""What the report and the console show of a run of agents: its curves, what is bad, and answers of several versions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shoal.errors import RunError
from shoal.extend.runs import Cell, Panel, Run, RunPanels, format_metric
from shoal.libs.agents.metrics import find_bad
from shoal.libs.agents.sessions.session import AgentSession
from shoal.libs.agents.spec import AgentsSpec
from shoal.libs.agents.transcripts import Transcripts, format_reward, format_task

MIN_STEPS = 5  # whose answers are shown, where there are so many
MAX_CHARACTERS = 400


def build_panels(run: Run) -> list[Panel]:
    """What is bad, and answers."""
    return [each for each in (_build_warnings(run), _build_answers(run)) if each.rows]


def _build_warnings(run: Run) -> Panel:
    metrics = run.latest(since_resumed=True)
    bad = find_bad(AgentsSpec.from_record(run.spec), metrics)
    rows = [(name, (format_metric(name, metrics[name]), "warn"), remedy) for name, remedy in bad.items()]
    return Panel(title="what is bad", header=("metric", "newest", "what helps"), rows=rows)


def _build_answers(run: Run) -> Panel:
    """As versions get newer, those of one task beside each other: the highest reward, and the lowest."""
    rows: list[Sequence[Cell]] = []
    with suppress(RunError):  # it is of another host, or begins
        transcripts = Transcripts(run)
        last = transcripts.records.find_last_step()
        steps = sorted(range(last, 0, -max(1, last // MIN_STEPS)))
        rows = [_make_row(transcripts, session) for step in steps for session in _choose_sessions(transcripts, step)]
    tasks = [row[1] for row in rows]
    rows.sort(key=lambda row: tasks.index(row[1]))
    about = "Of tasks of several steps of the learner, the answer of the highest reward and that of the lowest."
    return Panel(title="answers", about=about, header=("version", "task", "reward", "answer"), rows=rows)


def _choose_sessions(transcripts: Transcripts, step: int) -> list[AgentSession]:
    """Of one group that a step has taken, the highest and the lowest reward."""
    members = transcripts.records.list_of_step(step)
    loaded = [transcripts.records.fill(each) for each in members if each.group == members[0].group]
    rewards = {each: each.reward for each in loaded if each.reward is not None and each.tree.turns}
    ranked = sorted(rewards, key=lambda each: -rewards[each])
    return list(dict.fromkeys([*ranked[:1], *ranked[-1:]]))


def _make_row(transcripts: Transcripts, session: AgentSession) -> Sequence[Cell]:
    *_, last = transcripts.describe_turns(session)
    task, answer = (text.strip()[:MAX_CHARACTERS] for text in (format_task(session.opening.task), last["answer"]))
    return str(last["versions"][-1][0]), task, format_reward(session.reward), answer


PANELS = RunPanels(
    titles={
        "sessions/reward": "Mean reward, last 256 sessions",
        "sessions/length": "Mean length of answers (tokens)",
        "sessions/cut_fraction": "Share of answers that are cut off by their limit",
        "sessions/no_signal_fraction": "Share of groups that teach nothing, as all rewards are equal",
        "agents/entropy": "Entropy of the tokens (nats)",
        "agents/kl": "Divergence from the reference (nats a token)",
        "agents/token_lag_mean": "Token lag (versions behind the newest), mean",
        "agents/token_lag_max": "Token lag, largest",
        "agents/logprob_diff_mean": "Difference of log p, learner and sampler, mean",
        "agents/logprob_diff_max": "Difference of log p, learner and sampler, largest",
        "agents/ratio_max": "Largest ratio of probabilities, learner and sampler",
        "agents/clip_share": "Share of clipped tokens",
        "agents/reward": "Mean reward of a batch",
        "tokens/sampled_per_s": "Tokens sampled a second",
        "tokens/learned_per_s": "Tokens learnt a second",
    },
    cards={
        "train/step": "steps",
        "sessions/ended": "sessions",
        "sessions/length": "tokens an answer",
        "tokens/sampled_per_s": "tokens sampled a second",
        "tokens/learned_per_s": "tokens learnt a second",
    },
    criteria=(
        "sessions/reward",
        "sessions/length",
        "agents/entropy",
        "agents/kl",
        "agents/token_lag",
        "agents/logprob_diff",
        "agents/",
    ),
    folded=(
        "tokens/",
        *map("sessions/{}".format, ("open", "waiting", "credit", "window", "ended", "failed", "expired", "evicted")),
        *map("sessions/{}".format, ("steps", "answers", "branches", "sampling_overridden", "repeated")),
    ),
    panels=build_panels,
)
