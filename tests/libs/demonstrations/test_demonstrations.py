"""Demonstrations in files, in the loss, and on the command line."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from demonstration_case import ACTOR, make_site, read_all
from torch.distributions import Categorical, Normal

import shoal.runs
from rl_setting import EXPERIENCE, random_batch, segment
from shoal.errors import ConfigError
from shoal.libs.demonstrations.command import demonstrations
from shoal.libs.demonstrations.files import Demonstration, open_files
from shoal.libs.demonstrations.recorder import Recorder, copy_source
from shoal.libs.demonstrations.shown import Shown, fade
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.spec import RLSpec, experience_spec
from shoal.wire import ExperienceSpec, Segment


def shown_segment(length: int = 8, **changes: object) -> Segment:
    return segment(length, behaviour="human", **changes)


def record(site: DemonstrationSite, *segments: Segment, run_steps: int = 0) -> Recorder:
    recorder = Recorder(site)
    for seq, each in enumerate(segments):
        recorder.store(ACTOR, seq, each, run_steps)
    return recorder


# -- the loss ---------------------------------------------------------------------------------------------------------


def make_case(kind: str, folder: Path) -> tuple[RLSpec, ExperienceSpec, Segment]:
    """A spec, its experience, and a segment that was shown."""
    algorithm = {"name": "impala", "max_grad_norm": 1e9}
    spec = RLSpec(hidden=(6,), core="gru" if kind == "gru" else "none", core_size=5, algorithm=algorithm)
    random = np.random.default_rng(3)
    space, changes = gymnasium.spaces.Discrete(3), dict[str, object]()
    changes["actions"] = random.integers(0, 2, 8)
    if kind == "box":
        space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
        changes["actions"] = random.uniform(-1.9, 1.9, (8, 2)).astype(np.float32)
    if kind == "gru":
        changes["extras"] = {"state": random.normal(size=(1, 5)).astype(np.float32)}
    if kind == "masks":
        changes["extras"] = {"masks": np.array([[True, True, False]] * 9)}
    experience = experience_spec(gymnasium.spaces.Box(-9, 9, (4,), np.float32), space, spec, kind == "masks")
    return spec, experience, shown_segment(**changes)


def compute_cross_entropy(model: torch.nn.Module, kind: str, shown: Segment) -> torch.Tensor:
    """By hand: the mean of -log π of the actions, of a Box of their u."""
    observations = torch.from_numpy(shown.observations[:-1])
    actions = torch.from_numpy(shown.actions)
    if kind == "gru":
        outputs = model(observations[:, None], torch.from_numpy(shown.extras["state"]))[0][:, 0]
    else:
        outputs = model(observations)[0]
    if kind == "box":
        u, (mean, log_std) = torch.atanh(actions.double() / 2).float(), outputs.chunk(2, -1)
        return -Normal(mean, log_std.exp()).log_prob(u).sum(-1).mean()
    return -Categorical(logits=outputs[:, :2] if kind == "masks" else outputs).log_prob(actions).mean()


@pytest.mark.parametrize("kind", ["discrete", "box", "masks", "gru"])
def test_the_cloning_term_adds_the_weighted_gradient_of_the_cross_entropy(tmp_path: Path, kind: str) -> None:
    spec, experience, segment_shown = make_case(kind, tmp_path)
    torch.manual_seed(0)
    algorithm = make_algorithm(spec, experience)
    own = replace(segment_shown, log_probabilities=np.full(8, -1.0, np.float32), versions=np.ones(8, np.int64))
    batch = random_batch(1, [8], actions=own.actions, extras=own.extras)

    def find_gradients() -> list[torch.Tensor]:
        assert algorithm.is_usable(batch)  # computes them, and takes no step
        return [torch.zeros(1) if each.grad is None else each.grad.clone() for each in algorithm.model.parameters()]

    before = find_gradients()
    site = make_site(tmp_path, experience, weight=0.5, fade_steps=100)
    record(site, segment_shown, run_steps=40)
    algorithm.demonstrations = shown = Shown(site)
    shown.advance(90)  # half of its time is over
    shown.close()
    after = find_gradients()
    loss = compute_cross_entropy(algorithm.model, kind, segment_shown)
    by_hand = torch.autograd.grad(0.25 * loss, list(algorithm.model.parameters()), allow_unused=True)
    for old, new, expected in zip(before, after, by_hand, strict=True):
        torch.testing.assert_close(
            new - old, torch.zeros_like(old) if expected is None else expected, atol=2e-6, rtol=1e-4
        )
    result = shown.compute_loss(algorithm.compute_log_pi, is_finite)  # type: ignore[attr-defined]
    assert result is not None
    assert result == pytest.approx({"learner/demonstration_weight": 0.25, "learner/cloning_loss": loss.item()})


def is_finite(loss: torch.Tensor) -> bool:
    return bool(loss.isfinite())


def test_the_weight_falls_to_zero_in_its_steps(tmp_path: Path) -> None:
    spec = make_site(tmp_path, weight=2.0, fade_steps=100).spec
    assert [fade(spec, steps) for steps in (-5, 0, 50, 100, 500)] == [2.0, 2.0, 1.0, 0.0, 0.0]


def test_what_comes_is_cloned_at_once_and_what_is_dropped_is_forgotten(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = RLSpec(hidden=(8,), algorithm={"name": "impala", "learning_rate": 0.01})
    algorithm = make_algorithm(
        spec, experience_spec(gymnasium.spaces.Box(-9, 9, (4,), np.float32), gymnasium.spaces.Discrete(2), spec)
    )
    site = make_site(tmp_path, passes=3000)
    shown = algorithm.demonstrations = Shown(site)
    shown.poll()
    assert algorithm.clone_demonstrations() is False  # nothing was shown
    record(site, shown_segment(actions=(np.arange(8) >= 4).astype(np.int64)))
    shown.poll()
    before = -algorithm.compute_log_pi(shown.get_segments()).mean()  # type: ignore[attr-defined]
    assert algorithm.clone_demonstrations() is True
    assert algorithm.clone_demonstrations() is False  # once
    assert -algorithm.compute_log_pi(shown.get_segments()).mean() < 0.5 * before  # type: ignore[attr-defined]
    open_files(site).delete(open_files(site).list_names())
    shown.poll()
    assert list(shown.get_segments()) == []
    assert shown.compute_loss(algorithm.compute_log_pi, is_finite) is None  # type: ignore[attr-defined]


def test_a_learner_that_has_restarted_clones_what_has_come_since(tmp_path: Path) -> None:
    site = make_site(tmp_path, passes=256)
    recorder = record(site, shown_segment())
    recorder.store(ACTOR, 1, shown_segment(4), 100)
    shown = Shown(site)
    shown.advance(100)
    shown.close()
    assert (shown.take_cloning_steps(), shown.take_cloning_steps()) == (4, 0)


@pytest.mark.parametrize(
    ("spoils", "words", "num_left"),
    [
        (lambda segment, others: segment.rewards[0] == 9.0, "^[^,]*000001 of actor is not finite", 1),
        (lambda segment, others: len(others) > 1, "000000 of actor, .*000001 of actor is not finite", 0),
    ],
)
def test_what_would_spoil_the_loss_alone_or_together_is_left_out(
    spoils: Callable[..., bool], words: str, num_left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(tmp_path)
    record(site, shown_segment(), shown_segment(rewards=np.full(8, 9.0, np.float32)))
    shown = Shown(site)
    shown.poll()

    def compute_log_pi(segments: Sequence[Segment]) -> torch.Tensor:
        """As of a network that overflows."""
        return torch.cat([torch.full((8,), torch.nan if spoils(each, segments) else -1.0) for each in segments])

    assert shown.compute_loss(compute_log_pi, is_finite) is None
    assert re.search(words, caplog.text, re.MULTILINE)
    assert len(shown.get_segments()) == num_left
    if num_left:
        result = shown.compute_loss(compute_log_pi, is_finite)
        assert result is not None
        assert result["learner/cloning_loss"] == 1.0


@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_what_was_shown_with_an_infinite_gradient_is_left_out_and_no_actor_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    algorithm = make_algorithm(RLSpec(hidden=(), algorithm={"name": name}), EXPERIENCE)
    huge = shown_segment()
    huge.observations[3] = 1e30
    site = make_site(tmp_path, passes=100)
    record(site, huge, shown_segment())
    shown = algorithm.demonstrations = Shown(site)
    shown.poll()
    batch = random_batch(1, [8])
    assert len(list(algorithm.update(batch))) > 0
    assert algorithm.is_usable(batch)
    assert algorithm.clone_demonstrations() is True
    assert len(shown.get_segments()) == 1
    assert "000000 of actor is not finite" in caplog.text
    assert all(each.isfinite().all() for each in algorithm.model.parameters())


def test_a_recurrent_policy_is_unrolled_over_all_that_was_shown_of_an_episode(tmp_path: Path) -> None:
    """The states that came with later segments are of the network as it was then."""
    torch.manual_seed(0)
    spec, experience, whole = make_case("gru", tmp_path)
    algorithm: Any = make_algorithm(spec, experience)
    others_state = {"state": np.full((1, 5), 9.0, np.float32)}

    def cut(begin: int, end: int, **changes: object) -> Segment:
        return replace(
            whole,
            observations=whole.observations[begin : end + 1],
            actions=whole.actions[begin:end],
            rewards=whole.rewards[begin:end],
            **changes,  # type: ignore[arg-type]
        )

    site = make_site(tmp_path, experience)
    parts = [cut(0, 3), cut(3, 6, extras=others_state), cut(6, 8, extras=others_state, truncated=True)]
    other = segment(8, behaviour="script", extras=others_state)
    record(site, *parts[:2], other, parts[2])  # of two episodes at once
    shown = algorithm.demonstrations = Shown(site)
    shown.poll()
    assert [each.num_steps for each in shown.get_segments()] == [3, 3, 8, 2]  # as a replay takes them
    result = shown.compute_loss(algorithm.compute_log_pi, is_finite)
    assert result is not None
    separate = algorithm.compute_log_pi([whole, other])
    assert result["learner/cloning_loss"] == pytest.approx(-separate.mean().item(), rel=1e-5)


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(tmp_path)
    record(site, shown_segment())
    (tmp_path / "demonstrations/human-x.safetensors").write_bytes(b"half a file")
    shown = Shown(site)
    shown.poll()
    shown.poll()
    assert (shown.generation, caplog.text.count("human-x")) == (1, 1)  # a replay is not made again


# -- the files --------------------------------------------------------------------------------------------------------


def test_files_are_bounded_idempotent_and_outlive_the_gateway(tmp_path: Path) -> None:
    size = 2 * len(Demonstration.of(ACTOR, 0, shown_segment(), 0).to_bytes())
    site = make_site(tmp_path / "run", max_mb=(size + 10) / 2**20)
    ended = shown_segment(terminated=True, episode_return=8.0, episode_length=8)
    recorder = record(site, shown_segment(), shown_segment(), ended)
    recorder.store(ACTOR, 2, ended, 0)  # again, after a crash
    assert recorder.get_counts() == {"segments": 2, "steps": 16, "episodes": 1}
    names = open_files(site).list_names()
    assert [name.rpartition("-")[2] for name in names] == ["000001", "000002"]
    (tmp_path / "run/demonstrations/human-x.safetensors").write_bytes(b"half a file")
    assert Recorder(site).get_counts() == recorder.get_counts()
    payload = (tmp_path / f"run/demonstrations/{names[-1]}.safetensors").read_bytes()
    assert Demonstration.from_bytes(payload).info.episode_return == 8.0
    assert "demonstration" in json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])["__metadata__"]


def test_a_store_has_them_for_hosts_that_share_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    site = replace(make_site(tmp_path / "gateway", max_mb=1e-6), name="run-1")
    recorder = record(site, shown_segment(), shown_segment(4))  # the second takes the first one's place
    recorder.close()
    elsewhere = Shown(replace(site, folder=tmp_path / "learner"))
    elsewhere.poll()
    assert [each.num_steps for each in elsewhere.get_segments()] == [4]


def test_a_run_starts_with_those_of_another_and_names_what_does_not_fit(tmp_path: Path) -> None:
    record(make_site(tmp_path / "before"), shown_segment(), shown_segment(20), run_steps=5000)
    source = str(tmp_path / "before/demonstrations")
    site = make_site(tmp_path / "run", source=source)
    site.prepare()
    found = open_files(site)
    assert [each.info.run_steps for each in found.read_sound().values()] == [0, 0]
    found.delete(found.list_names()[:1])
    site.prepare()  # as a resumed run does
    assert len(found.list_names()) == 1
    other = experience_spec(gymnasium.spaces.Box(-9, 9, (5,), np.float32), gymnasium.spaces.Discrete(2), RLSpec())
    with pytest.raises(ConfigError, match=r"demonstrations.source.*observations: \[9, 4\], expected \[9, 5\]"):
        copy_source(make_site(tmp_path / "other", other, source=source))
    spec = RLSpec(core="gru")
    recurrent = experience_spec(gymnasium.spaces.Box(-10, 10, (4,), np.float32), gymnasium.spaces.Discrete(2), spec)
    copied = make_site(tmp_path / "gru", recurrent, source=source)
    copy_source(copied)  # another network's state says nothing to it
    states = [each.segment.extras["state"] for each in read_all(tmp_path / "gru/demonstrations").values()]
    assert [(state.shape, state.any()) for state in states] == [((1, spec.core_size), False)] * 2
    with pytest.raises(ConfigError, match="has no demonstrations"):
        copy_source(make_site(tmp_path / "none", source=str(tmp_path)))
    assert RLSpec().override([f"demonstrations={source}", "demonstrations.share=0.5"]).demonstrations.source == source


# -- the command ------------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    return CliRunner().invoke(demonstrations, list(words))


def test_the_command_lists_films_copies_and_drops(tmp_path: Path) -> None:
    with shoal.runs.create("job", "env: CartPole-v1") as run:
        pass
    assert "nobody has shown anything" in call(run.id).output
    ended = shown_segment(4, terminated=True, episode_return=4.0, episode_length=12)
    site = make_site(run.folder)
    record(
        site,
        shown_segment(),
        ended,
        segment(2, behaviour="script", truncated=True, episode_return=1.0, episode_length=2),
    )
    assert (run.folder / "demonstrations").is_dir()
    listed = call(run.id).output.splitlines()
    assert listed[1].split() == ["human", "1", "2", "12", "4"]
    assert listed[2].split() == ["script", "1", "1", "2", "1"]
    names = open_files(site).list_names()
    film = call(run.id, "--film", names[1]).output.splitlines()
    assert len(film) == 2 + 4 + 1
    assert film[2].split()[:3] == ["0", "0", "1"]
    assert film[-1].startswith("terminated")
    assert "3 demonstrations" in call(run.id, "--out", str(tmp_path / "shown")).output
    assert len(list((tmp_path / "shown").glob("*.safetensors"))) == 3
    wrong = call(run.id, "--drop", "humans")
    assert isinstance(wrong.exception, ConfigError)
    assert "dropped 2 of 3" in call(run.id, "--drop", "human").output
    assert [each.partition("-")[0] for each in open_files(site).list_names()] == ["script"]
    assert "dropped 1 of 1" in call("latest", "--drop", names[2]).output
