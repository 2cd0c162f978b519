"""What a loop's spec refuses before anything listens."""

import sys

import gymnasium
import numpy as np
import pytest
import torch

import shoal.runs
from shoal.errors import ClusterError, ConfigError, SpecMismatch
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check
from shoal.plugins.library import collect_extensions
from shoal.rl.algorithm_config import GROUP
from shoal.rl.gateway.listener import find_listener
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import RLSpec, experience_spec
from shoal.train.spec import TrainSpec


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_a_host_beyond_loopback_needs_encryption(host: str) -> None:
    with pytest.raises(ConfigError, match="curve=true"):
        GatewaySpec.parse({"host": host})
    with pytest.raises(ConfigError, match="curve=true"):
        GatewaySpec.parse({"advertise": "learn.example:5555"})
    assert GatewaySpec.parse({"host": host, "curve": True}).curve
    assert GatewaySpec.parse({"advertise": "127.0.0.1:5555"}).advertised == ("127.0.0.1", 5555)


def test_websocket_beyond_loopback_needs_a_certificate() -> None:
    tls = {"certificate": "/etc/game.pem", "key": "/etc/game.key"}
    for fields in ({"host": "0.0.0.0"}, {"advertise": "learn.example"}):
        with pytest.raises(ConfigError, match=r"give tls\.certificate and tls\.key"):
            GatewaySpec.parse({"curve": True, "websocket": 0, **fields})
        assert GatewaySpec.parse({"curve": True, "websocket": 0, "tls": tls, **fields}).tls is not None
    with pytest.raises(ConfigError, match="give websocket=PORT"):
        GatewaySpec.parse({"tls": tls})
    with pytest.raises(ConfigError, match="give the full path"):
        GatewaySpec.parse({"websocket": 0, "tls": {**tls, "key": "game.key"}})
    with pytest.raises(ConfigError, match=r"no origin such as https://game\.example"):
        GatewaySpec.parse({"websocket": 0, "origins": ["https://game.example/page"]})


def test_without_its_library_a_websocket_port_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_listener(GatewaySpec()) is None
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets" or ".libs.websocket." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"gateway\.websocket = 0: .*CHECKOUT\[games\]"):
        find_listener(GatewaySpec(websocket=0))


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("learn.example", ("learn.example", 0)),
        ("learn.example:5555", ("learn.example", 5555)),
        ("192.0.2.7:5555", ("192.0.2.7", 5555)),
        ("[2001:db8::7]:5555", ("2001:db8::7", 5555)),
        ("[2001:db8::7]", ("2001:db8::7", 0)),
        ("", ("", 0)),
    ],
)
def test_an_advertised_address_is_a_host_with_or_without_a_port(advertise: str, expected: tuple[str, int]) -> None:
    assert GatewaySpec.parse({"curve": True, "advertise": advertise}).advertised == expected


@pytest.mark.parametrize(
    ("advertise", "problem"),
    [
        ("tcp://learn.example:5555", "is not HOST or HOST:PORT"),
        ("learn.example:", "is not HOST or HOST:PORT"),
        ("2001:db8::7", "is not HOST or HOST:PORT"),
        ("one:1,two:2", "is not HOST or HOST:PORT"),
        ("learn.example:0", "within 1 and 65535"),
        ("learn.example:65536", "within 1 and 65535"),
        ("-a b-:5555", "no host name or address"),
        ("[12:34]:5555", "12:34"),
        ("0.0.0.0:5555", "names no host"),
    ],
)
def test_an_advertised_address_that_no_actor_can_use_is_refused(advertise: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        GatewaySpec.parse({"curve": True, "advertise": advertise})
    assert caught.value.field == "advertise"


def test_actions_that_do_not_count_from_zero_are_refused() -> None:
    box, spec = gymnasium.spaces.Box(-1, 1, (4,)), RLSpec()
    assert experience_spec(box, gymnasium.spaces.Discrete(3), spec).action.high == 2
    with pytest.raises(ConfigError, match="starts at 1"):
        experience_spec(box, gymnasium.spaces.Discrete(3, start=1), spec)


def test_a_package_that_cannot_be_imported_hides_no_algorithm_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {**collect_extensions(GROUP), "broken": "no_such_package.algorithm:Config"}
    for module in ("shoal.rl.algorithm_config", "shoal.plugins.find"):
        monkeypatch.setattr(f"{module}.collect_extensions", lambda group: others)
    box = gymnasium.spaces.Box(-1, 1, (4,))
    with pytest.raises(ConfigError, match=r"dqn needs a Discrete action space.*algorithm=impala.*algorithm=sac"):
        experience_spec(box, gymnasium.spaces.Box(-1, 1, (2,)), RLSpec().override(["algorithm=dqn"]))


def test_observations_of_nothing_are_refused() -> None:
    box = gymnasium.spaces.Box(-1, 1, (0,))
    with pytest.raises(ConfigError, match=r"this algorithm needs a flat Box.*FlattenObservation"):
        experience_spec(box, gymnasium.spaces.Discrete(2), RLSpec())


def test_observations_of_a_type_that_cannot_travel_are_refused_by_name() -> None:
    box = gymnasium.spaces.Box(-1, 1, (4,), np.longdouble)
    with pytest.raises(ConfigError, match=rf"observes {box.dtype.name}, which cannot travel. wrap it; .*float64"):
        experience_spec(box, gymnasium.spaces.Discrete(2), RLSpec())


def test_a_segment_that_no_message_can_hold_is_refused_before_anything_starts() -> None:
    box, actions = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    with pytest.raises(ConfigError, match=r"gateway.max_message_bytes = .* is below the \d+ bytes"):
        experience_spec(box, actions, RLSpec(segment_length=10**9))


@pytest.mark.parametrize(
    ("words", "field"), [("target_return=.nan", "target_return"), ("hidden=[0]", "hidden"), ("hidden=[-4]", "hidden")]
)
def test_values_with_which_nothing_can_be_learnt_are_refused(words: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ActorLearnerSpec().override([words])


def resume(*words: str) -> ActorLearnerSpec:
    """The spec of a run of these words that has learnt, and is resumed."""
    spec = ActorLearnerSpec().override(words)
    with shoal.runs.create("actor_learner", spec.to_yaml(), "one") as run:
        run.finish("stopped")
    resumed = spec.override(["resume=one"])
    check(resumed.override(["hidden=[8]"]))  # it has learnt nothing yet
    (run.folder / "checkpoints" / "step-000000001").mkdir(parents=True)
    check(resumed)
    return resumed


RECURRENT = ["algorithm=ppo", "core=gru", "core_size=128"]


@pytest.mark.parametrize(
    ("learnt", "words", "problem"),
    [
        ([], ["hidden=[8]"], r"hidden = \[8\]: run one has learnt with \[64, 64\]"),
        ([], ["env=Acrobot-v1"], "has learnt CartPole-v1"),
        ([], ["algorithm=dqn"], "algorithm = 'dqn': run one has learnt with another network, by name='ppo'"),
        ([], ["algorithm=r2d2"], "algorithm = 'r2d2': run one has learnt with another network"),
        # a state as large
        (RECURRENT, ["core=lstm", "core_size=64"], r"core = 'lstm of 64': run one has learnt with gru of 128"),
        (RECURRENT, ["core_size=64"], r"core = 'gru of 64': run one has learnt with gru of 128"),
        (RECURRENT, ["core=none"], r"core = 'none': run one has learnt with gru of 128"),
    ],
)
def test_what_does_not_fit_what_a_run_has_learnt_is_refused(learnt: list[str], words: list[str], problem: str) -> None:
    resumed = resume(*learnt)
    check(resumed.override(["algorithm=impala"]))
    if not learnt:  # it has no core
        check(resumed.override(["core_size=8"]))
    with pytest.raises(SpecMismatch, match=problem):
        check(resumed.override(words))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_the_learner_cannot_take_is_refused_before_it_starts(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"learner\.seed"):
        RLSpec().override([f"learner.seed={seed}"])
    for taken in (2**64 - 1, -(2**63)):
        torch.Generator().manual_seed(RLSpec().override([f"learner.seed={taken}"]).learner.seed)


@pytest.mark.parametrize("alias", ["Champion", "prod/eu", "2", "latest"])
def test_an_alias_that_can_stand_for_no_version_is_refused_before_anything_is_learnt(alias: str) -> None:
    for spec in (ActorLearnerSpec(), TrainSpec()):
        with pytest.raises(ConfigError, match="aliases"):
            spec.override([f"aliases=['{alias}']"])


def test_words_that_a_resumed_run_cannot_start_with_are_not_kept() -> None:
    """A port that is taken would be taken at every later resumption too, which goes by the record."""
    before = ActorLearnerSpec()
    with shoal.runs.create("actor_learner", before.to_yaml(), "one") as recorder:
        recorder.record_event("gateway_ready")
    words = before.override(["resume=one", "gateway.port=5555"]).to_yaml()
    resumed = shoal.runs.recording(words, "actor_learner", begun="gateway_ready", resumed="one")
    with pytest.raises(ClusterError, match="taken"), resumed:
        raise ClusterError("the port is taken")
    assert shoal.runs.load("one").spec == before.to_yaml()
    with shoal.runs.recording(words, "actor_learner", begun="gateway_ready", resumed="one") as recorder:
        recorder.record_event("gateway_ready")
    assert "port: 5555" in shoal.runs.load("one").spec


def test_an_algorithm_is_chosen_by_its_name_and_set_by_its_fields() -> None:
    spec = RLSpec().override(["algorithm.learning_rate=0.5"])
    assert spec.algorithm.model_dump()["learning_rate"] == 0.5
    assert RLSpec.from_yaml(spec.to_yaml()) == spec
    assert spec.override(["algorithm=ppo"]) == spec
    for words, match in (
        (["algorithm=reinforce"], "'reinforce' is none of impala"),
        (["algorithm.rate=3"], "algorithm.rate = 3: no such field"),
        (["algorithm.discount=3"], "discount = 3"),
    ):
        with pytest.raises(ConfigError, match=match):
            RLSpec().override(words)


def test_an_algorithm_says_how_much_experience_it_takes_and_of_what_age() -> None:
    assert RLSpec().batch_limits == (1024, 4096)
    assert RLSpec().applied_gateway.max_version_lag == 30
    dqn = RLSpec().override(["algorithm=dqn"])
    assert dqn.batch_limits == (256, 512)
    assert dqn.applied_gateway.max_version_lag > 10**9
    assert dqn.override(["learner.batch_steps=64"]).batch_limits == (64, 512)
    assert RLSpec().override(["learner.batch_steps=5000"]).batch_limits == (5000, 5000)
    assert dqn.override(["learner.max_batch_steps=100"]).batch_limits == (100, 100)
    with pytest.raises(ConfigError, match="max_batch_steps = 10 is below batch_steps = 20"):
        dqn.override(["learner.batch_steps=20", "learner.max_batch_steps=10"])


def test_an_average_needs_past_versions() -> None:
    with pytest.raises(ConfigError, match=r"self_play\.snapshot_every"):
        ActorLearnerSpec().override(["action=average"])
    assert ActorLearnerSpec().override(["action=average", "self_play.snapshot_every=10"]).action == "average"
