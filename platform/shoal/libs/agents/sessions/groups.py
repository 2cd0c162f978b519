"""The groups of a run's sessions: how they are compared, and what becomes of their tokens. Pure: times are given.

Sessions of one task are a group: its baseline is computed when the group is over, once, and travels in the segments.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shoal.extend.rl import Segment
from shoal.libs.agents.baselines import Baseline, compute_advantages, measure_deviation
from shoal.libs.agents.sessions.session import AgentSession, count_versions
from shoal.libs.agents.sessions.token_tree import TrainingSegment
from shoal.libs.agents.spec import SessionsSpec


@dataclass(eq=False)
class SessionGroup:
    """Sessions of one task. num_unopened: those that may still join"""

    name: str
    num_unopened: int
    members: list[AgentSession] = field(default_factory=list)
    first_end_at: float | None = None

    def is_complete(self, now_s: float, group_s: float) -> bool:
        """Whether all have ended, or the others have had their time."""
        has_open = self.num_unopened or any(each.state == "open" for each in self.members)
        return self.first_end_at is not None and (not has_open or now_s >= self.first_end_at + group_s)


@dataclass
class GroupOutcome:
    """What becomes of a group. Its sessions have their advantages.

    segments: to learn
    dropped:  sampled tokens that are not learnt, by reason and version
    num_sessions: by reason; "" of those that are learnt
    num_reserved: sessions that were never opened
    """

    members: list[AgentSession]
    segments: list[Segment] = field(default_factory=list)
    dropped: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_sessions: Counter[str] = field(default_factory=Counter)
    num_reserved: int = 0

    def drop(self, session: AgentSession, reason: str) -> None:
        """Drop what a session has sampled."""
        self.num_sessions[reason] += 1
        for version, num_tokens in count_versions(session.tree.turns.values()).items():
            self.dropped[reason, version] += num_tokens

    def emit(self, session: AgentSession) -> None:
        """Let the turns of a session be learnt that train."""
        self.num_sessions[""] += 1
        self.segments += make_segments(session)
        for turn in session.tree.turns.values():
            if not turn.trains:
                self.dropped += Counter({(turn.why_not, version): num for version, num in turn.spans})


def compare_group(group: SessionGroup, baseline: Baseline, rules: SessionsSpec) -> GroupOutcome:
    """Compare the sessions that have a reward; what the others have sampled is dropped with the reason."""
    outcome = GroupOutcome(group.members, num_reserved=group.num_unopened)
    graded: dict[AgentSession, float] = {}
    for each in group.members:
        is_dropped = rules.truncated == "drop" and each.ending is not None and each.ending.truncated
        if each.reward is None or is_dropped:
            outcome.drop(each, "truncated" if each.state == "ended" else each.state)
        else:
            graded[each] = each.reward
    rewards = np.array([*graded.values()], np.float32)
    size = group.num_unopened + len(group.members)
    needed = 1 if size == 1 else max(2, rules.min_group or math.ceil(size / 2))
    if len(graded) < needed:
        for each in graded:
            outcome.drop(each, "group_incomplete")
        return outcome
    advantages = compute_advantages(rewards, baseline)
    # An answer of the mean reward has no gradient either, but its tokens count in the loss's denominator. With the
    # baseline "global" the learner takes the mean of the batch.
    has_signal = advantages.any() or baseline == "global"
    for each, advantage in zip(graded, advantages, strict=True):
        if has_signal:
            each.advantage, each.deviation = float(advantage), measure_deviation(rewards, baseline)
            outcome.emit(each)
        else:
            outcome.drop(each, "no_signal")
    return outcome


def make_segments(session: AgentSession) -> list[Segment]:
    """What is learnt of a session that has an advantage: A_i of `baselines`, with the deviation d."""
    assert session.reward is not None
    assert session.advantage is not None
    segments = []
    for given in session.tree.segments():
        path = [session.tree.turns[number] for number in given.turns]
        sizes = [len(turn.prompt) + len(turn.tokens) for turn in path]
        earlier = [sum(reward for number, reward in session.rewards.items() if number < turn.id) for turn in path]
        passed = np.repeat(earlier, sizes) / session.deviation
        segments.append(make_segment(given, session.reward, session.advantage, passed))
    return segments


def make_segment(given: TrainingSegment, reward: float, advantage: float, passed: np.ndarray | float = 0.0) -> Segment:
    """The steps of a text: the observation is a token, the action the next one.

    advantage: of the episode; passed: float [T], what is less in that of a token, for rewards before it
    Ends with the last token that is trained. Others count as of the newest version of the segment, so that only what
    is trained can be too old.
    """
    end = int(np.flatnonzero(given.trains)[-1]) + 1
    tokens, trains = given.tokens[:end].astype(np.int32), given.trains[:end]
    versions = np.where(trains, given.versions[:end], given.versions[:end][trains].max())
    rewards = np.zeros(end - 1, np.float32)
    rewards[-1] = reward
    return Segment(
        observations=tokens,
        actions=tokens[1:],
        rewards=rewards,
        log_probabilities=np.where(trains, given.logprobs[:end], 0).astype(np.float32)[1:],
        versions=versions.astype(np.int64)[1:],
        terminated=True,
        episode_return=reward,
        episode_length=int(trains.sum()),
        extras={
            "trains": np.append(trains[1:], False),
            "advantage": np.append((advantage - passed * np.ones(len(given.tokens)))[1:end], advantage).astype(
                np.float32
            ),
        },
    )
