"""An actor that claims impossible log-probabilities is put in quarantine; one that lags, or explores, never is."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rl_setting import EXPERIENCE as OTHER_MODEL
from rl_setting import TOKEN, segment
from shoal.actor import ActorClient
from shoal.actor.policy import make_policy
from shoal.actor.segment_builder import SegmentBuilder
from shoal.cli.commands import runs
from shoal.errors import ConfigError
from shoal.rl.experience.quarantine import (
    LIMIT,
    EvidenceTable,
    compute_evidence,
    read_quarantine,
    read_run_quarantine,
    release_actor,
)
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.local_loop import LocalLoop
from shoal.rl.spec import RLSpec, policy_spec
from shoal.runs.event_messages import format_warning
from sign_game import SignGame
from typed import typed
from waiting import start_thread, wait_for

A = ("a", 1)
SPEC = RLSpec(hidden=(16,)).override(
    [
        "learner.batch_steps=64",
        "learner.max_batch_steps=64",
        "learner.take_timeout_s=0.1",
        "algorithm.learning_rate=0.02",
        "gateway.heartbeat_s=0.2",
        "gateway.max_version_lag=1000",
    ]
)
EXPERIENCE = msgspec.structs.replace(OTHER_MODEL, policy=policy_spec(SPEC.hidden))


def draw_log_ratios(random: np.random.Generator, num_steps: int, distance: float) -> np.ndarray:
    """Of an honest actor: policies over four actions, whose logits differ by `distance` (normal)."""
    mu_logits = random.normal(size=(num_steps, 4))
    pi_logits = mu_logits + distance * random.normal(size=(num_steps, 4))
    log_mu, log_pi = (each - np.log(np.exp(each).sum(1, keepdims=True)) for each in (mu_logits, pi_logits))
    actions = (np.exp(log_mu).cumsum(1) > random.random((num_steps, 1))).argmax(1)
    rows = np.arange(num_steps)
    return log_pi[rows, actions] - log_mu[rows, actions]


@pytest.mark.parametrize("distance", [0.0, 0.3, 3.0])
def test_honest_actors_are_never_accused_however_far_they_lag(distance: float) -> None:
    random = np.random.default_rng(0)
    table = EvidenceTable()
    highest = 0.0
    for _ in range(200):
        log_ratios = draw_log_ratios(random, 16 * 64, distance).astype(np.float32)
        evidence = compute_evidence(log_ratios, np.zeros(16 * 64), np.full(64, 16))
        assert table.add([A] * 64, evidence.tolist()) == {}
        highest = max(highest, table._evidence.get("a", (0.0, 0))[0])
    assert highest < LIMIT / 2  # in 204,800 steps


def test_rounding_is_no_evidence_where_densities_are_far_from_their_means() -> None:
    """A narrow policy whose actions are at their bounds: log-densities of -245,000, in float32."""
    random, table = np.random.default_rng(0), EvidenceTable()
    exact = random.uniform(-3e5, 3.0, (200, 1024))
    for row in exact:
        log_mu, log_pi = row.astype(np.float32), (row * (1 + 1e-6 * random.normal(size=1024))).astype(np.float32)
        evidence = compute_evidence(log_pi - log_mu, log_mu, np.full(64, 16))
        assert table.add([A] * 64, evidence.tolist()) == {}
    assert table._evidence == {}


@pytest.mark.parametrize("claimed", [-1.5, -3.0, -10.0])
def test_an_actor_that_claims_less_than_it_has_is_accused_after_a_while(claimed: float) -> None:
    """It always claims the same; its actions have probabilities of about one half."""
    random, table = np.random.default_rng(0), EvidenceTable()
    for num_segments in range(1, 400):
        log_ratios = np.log(random.uniform(0.4, 0.6, 16)) - claimed
        evidence = compute_evidence(log_ratios, np.full(16, claimed), np.array([16]))
        if found := table.add([A], evidence.tolist()):
            assert "claims log-probabilities that its actions cannot have" in found["a"]
            assert num_segments <= {-1.5: 40, -3.0: 10, -10.0: 2}[claimed]
            return
    raise AssertionError("it was never accused")


def test_queued_segments_of_an_accused_actor_are_dropped_and_a_restart_remembers_it(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    queue = ExperienceQueue(8, Ledger(path))
    for seq in range(3):
        queue.put(A, seq, segment(8))
        queue.put(("b", 1), seq, segment(8))
    batch = queue.take("learner", BatchRequest(16, 16, 8, 0))
    assert batch is not None
    assert queue.acknowledge(batch.lease_id, [None, None], [LIMIT + 1, 0.5])
    assert queue.acknowledge(batch.lease_id, [None, None], [LIMIT + 1, 0.5])  # repeated: counted once
    account = queue.ledger.get_account(A)
    assert (account.consumed, account.dropped) == (1, {"quarantined": 2})
    assert account.is_balanced
    assert len(queue) == 2
    queue.ledger.commit()
    assert list(read_quarantine(path)) == ["a"]
    queue.ledger.close()
    again = Ledger(path)
    assert list(again.quarantined) == ["a"]
    assert release_actor(path, "a")
    assert not release_actor(path, "a")
    again.load_quarantine()
    assert again.quarantined == {}
    again.close()
    assert read_quarantine(tmp_path / "none.sqlite") == {}


class Actor:
    """Plays honestly, but says of its log-probabilities what `claim` makes of them; applies weights seldom."""

    def __init__(self, loop: LocalLoop, name: str, claim: float | None, pull_every: int = 1) -> None:
        self._loop = loop
        self._name = name
        self.claim = claim
        self._pull_every = pull_every
        self.drops: dict[str, int] = {}
        self.thread = start_thread(self._play)

    def _play(self) -> None:
        with ActorClient(self._loop.address, TOKEN, self._name, timeout_s=60) as client:
            self.drops = client.drops
            game, builder = SignGame(), SegmentBuilder(client.spec)
            policy = make_policy(client.spec.policy, 1, self._name, client.spec.action.shape)
            policy.load(*client.wait_for_weights())
            observation, num_episodes = game.reset(seed=1)[0], 0
            builder.begin(observation)
            while not client.finished:
                action, log_probability = policy.act(observation)
                claimed = log_probability if self.claim is None else self.claim
                observation, reward, ended, _, _ = game.step(action)
                done = builder.step(action, claimed, policy.version, reward, observation, ended, False)
                if done is not None:
                    client.send(done, timeout_s=None)
                if ended:
                    num_episodes += 1
                    observation = game.reset()[0]
                    builder.begin(observation)
                    newer = client.newer_weights(policy.version)
                    if newer and num_episodes % self._pull_every == 0:
                        policy.load(*newer)


def test_the_liar_alone_is_dropped_until_it_is_mended_and_released(tmp_path: Path) -> None:
    with LocalLoop(SPEC, EXPERIENCE, tmp_path / "run", TOKEN) as loop:
        actors = [Actor(loop, "honest", None), Actor(loop, "slow", None, pull_every=40), Actor(loop, "liar", -4.0)]
        ledger = tmp_path / "run" / LEDGER_NAME
        wait_for(lambda: read_quarantine(ledger))
        wait_for(lambda: actors[2].drops.get("quarantined", 0) > 5)
        events: list[tuple[str, str]] = []

        def has_event(wanted: str) -> bool:
            events.extend((kind, details["actor_id"]) for _, kind, details in loop.gateway.take_events())
            return any(kind == wanted for kind, _ in events)

        wait_for(lambda: has_event("actor_quarantined"))
        assert list(read_quarantine(ledger)) == ["liar"]
        assert list(loop.gateway.stats()["quarantined"]) == ["liar"]
        actors[2].claim = None
        received = loop.ledger.get_account
        assert release_actor(ledger, "liar")
        wait_for(lambda: not loop.gateway.stats()["quarantined"])
        [key] = [each for each in loop.ledger.get_accounts() if each[0] == "liar"]
        consumed = received(key).consumed
        wait_for(lambda: received(key).consumed > consumed + 20)
        assert read_quarantine(ledger) == {}
        wait_for(lambda: has_event("actor_released"))
        changes = [each for each in events if each[0] in ("actor_quarantined", "actor_released")]
        assert changes == [("actor_quarantined", "liar"), ("actor_released", "liar")]
    for each in actors:
        each.thread.join(60)
    totals = loop.ledger.get_totals()
    assert totals.is_balanced


@pytest.mark.parametrize("policy", [".", "hunters"])
def test_the_command_releases_and_names_who_can_be_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Of a run, and of one of several policies in a run."""
    folder = tmp_path / "run-1"
    (folder / policy).mkdir(parents=True)
    ledger = Ledger(folder / policy / LEDGER_NAME)
    ledger.quarantine("actor 3", "claims too much")
    ledger.close()
    run = type("FakeRun", (), {"folder": folder, "id": "run-1"})()
    monkeypatch.setattr(runs, "load", lambda name: run)
    with pytest.raises(ConfigError, match=r"is not in quarantine in run run-1\. these are: actor 3"):
        typed("release latest other", is_caught=False)
    done = typed("release latest 'actor 3'", is_caught=False)
    assert "actor 3 is released" in done.output
    assert read_run_quarantine(folder) == {}
    warning = format_warning("actor_quarantined", {"actor_id": "actor 3", "reason": "claims too much"})
    assert warning == "actor 3 is in quarantine, it claims too much: mend it, then shoal release RUN 'actor 3'"
