"""`shoal export --to game`: each language's runtime computes what torch does, from one table of vectors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from benchmarks.game_runtimes import build, run, write_table
from gymnasium import spaces

import shoal.runs
from libs.export.exported import Pair, register_file
from libs.export.exported import register as register_module
from registered import arrays_of, tensors
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import describe_policy_model, register_policy
from shoal.libs.export.export_model import ExportReport, ExportSpec, export_model
from shoal.registry import Signature
from shoal.rl.algorithms.normalization import Normalizer
from shoal.rl.spec import experience_spec
from shoal.weights import WeightSnapshot
from typed import said

RUNTIMES = {"Policy.gd", "PolicyLayer.gd", "policy.mjs", "Policy.cs", "policy.hpp"}
FLAT = spaces.Box(-1, 1, (5,), np.float32)
FRAME = spaces.Box(0, 255, (12, 12, 1), np.uint8)
FOUR, CHOICES = spaces.Discrete(4), spaces.MultiDiscrete([3, 2])
TORQUE = spaces.Box(np.float32([-2, 0.5]), np.float32([2.25, 500]), (2,), np.float32)
POLICY = Signature(
    inputs=tensors(observation=[-1, 3]),
    outputs=tensors(action=("INT64", [-1])),
)
CASES: dict[str, tuple[Any, ...]] = {  # the space of observations, and of actions; whether there are masks; overrides
    "categorical": (FLAT, FOUR, True, "algorithm=impala", "normalize_observations=true", "action=sampled"),
    "choices_gru": (FLAT, CHOICES, True, "algorithm=ppo", "core=gru"),
    "torque_lstm": (FLAT, TORQUE, False, "algorithm=ppo", "core=lstm"),
    "torque_sac": (FLAT, TORQUE, False, "algorithm=sac"),
    "values": (FLAT, FOUR, True, "algorithm=dqn"),
}


def register(observed: Any, acted: Any, has_masks: bool, *overrides: str, members: int = 0, graph: bytes = b"") -> None:
    """A version of `game`, with weights at random. members: a mixture of so many"""
    spec = ActorLearnerSpec(env="Game-v0").override(["endpoint.name=game", "hidden=[32,20]", *overrides])
    experience = experience_spec(observed, acted, spec, has_masks)
    torch.manual_seed(3)
    model: Any = describe_policy_model(spec, experience)[0].build()
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)
    weights = arrays_of(model)
    normalizer = Normalizer(spec, experience)
    if (seen := normalizer._moments.get("observations")) is not None:
        seen.add(np.random.default_rng(0).normal(5, 3, (100, 5)))
    snapshot = WeightSnapshot.of(1, normalizer.fold(weights))
    experience = msgspec.structs.replace(experience, policy=msgspec.structs.replace(experience.policy, graph=graph))
    stats, pool = {"mean_return": 1, "steps": 1}, [snapshot] * members
    register_policy(spec, experience, snapshot, "run", stats, action=spec.action or "best", pool=pool)


def write(into: Path, **fields: Any) -> ExportReport:
    return export_model(ExportSpec.parse({"model": "game", "to": "game", "into": str(into), **fields}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The exported folder of each case."""
    base = tmp_path_factory.mktemp("games")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(base / "home"))
        for name, case in CASES.items():
            register(*case)
            assert write(base / name).warning == ""
            write_table(base / name)
    return [base / name for name in CASES]


@pytest.mark.parametrize("language", ["C++", "C#", "GDScript", "JavaScript"])
def test_each_language_computes_what_torch_does(language: str, folders: list[Path], tmp_path: Path) -> None:
    differences = [each for each, _ in run(build(language, folders[0], tmp_path), 0, folders)]
    assert max(differences) < 1e-5, dict(zip(CASES, differences, strict=True))
    assert min(differences) > 0  # numbers were compared


def test_the_vectors_are_of_two_episodes_and_of_every_kind_of_action(folders: list[Path]) -> None:
    for folder in folders:
        policy, vectors = (json.loads((folder / f"{name}.json").read_text()) for name in ("policy", "vectors"))
        assert [each["reset"] for each in vectors] == [True, *[False] * 4, True, False, False]
        assert policy["action"] == ("sampled" if folder.name == "categorical" else "best")
        is_greedy = policy["kind"] == "epsilon_greedy"
        assert any(each["sampled"] != each["action"] for each in vectors) is not is_greedy
        for each in vectors:
            assert all(each["state"]) is (policy["state_size"] > 0 and not each["reset"]) or not policy["state_size"]
            bounds = np.cumsum([0, *policy["action_sizes"][:-1]], dtype=int)
            for chosen in (each["action"], each["sampled"]) if each["mask"] else ():
                assert all(each["mask"][begin + choice] for begin, choice in zip(bounds, chosen, strict=True))


def list_types(graph: onnx.GraphProto) -> set[int]:
    """The types of a graph's constants, and of what it casts to."""
    attributes = [each for node in graph.node for each in node.attribute]
    constants = [*graph.initializer, *(each.t for each in attributes if each.name == "value")]
    return {each.data_type for each in constants} | {each.i for each in attributes if each.name == "to"}


def test_onnx_is_what_unity_reads_and_answers_the_vectors(folders: list[Path]) -> None:
    for folder in folders:
        model = onnx.load(folder / "policy.onnx")
        assert [each.version for each in model.opset_import] == [15]
        assert not {"GRU", "LSTM", "RNN"} & {each.op_type for each in model.graph.node}
        assert onnx.TensorProto.DOUBLE not in list_types(model.graph)
        session = onnxruntime.InferenceSession(folder / "policy.onnx")
        for vector in json.loads((folder / "vectors.json").read_text()):
            given = {"observation": vector["observation"], "state": vector["state"]}
            feeds = {name: np.array([each], np.float32) for name, each in given.items() if each}
            feeds |= {"action_mask": np.array([vector["mask"]])} if vector["mask"] else {}
            names = [each.name for each in session.get_outputs()]
            answer = dict(zip(names, session.run(None, feeds), strict=True))
            np.testing.assert_allclose(answer["action"].ravel(), vector["action"], rtol=1e-5, atol=1e-5)
            for each in answer.keys() & {"next_state", "logits"}:
                wanted = vector["next_state" if each == "next_state" else "outputs"]
                np.testing.assert_allclose(answer[each][0], wanted, rtol=1e-5, atol=1e-5)


def test_runtimes_say_by_name_what_does_not_fit(folders: list[Path]) -> None:
    program = """
        const { Policy } = await import(process.argv[1] + '/policy.mjs');
        const json = JSON.parse((await import('node:fs')).readFileSync(process.argv[1] + '/policy.json'));
        const all = [1, 1, 1, 1], none = [0, 0, 0, 0], x = [0, 0, 0, 0, 0], policy = new Policy(json);
        const attempts = [
          () => new Policy({ ...json, format: 2 }), () => new Policy({ ...json, unsupported: 'it has convolutions' }),
          () => policy.act([1], all), () => policy.act(x), () => policy.act(x, none),
          () => policy.act([NaN, 0, 0, 0, 0], all),
        ];
        for (const attempt of attempts) try { attempt(); } catch (error) { console.log(error.message); }
        """
    command = ["node", "--input-type=module", "-e", program, str(folders[0])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        "policy.json: its format is 2, this file reads 1",
        "policy.json: it has convolutions: run policy.onnx",
        "observation and mask: 1 and 4 numbers, expected 5 and 4",
        "observation and mask: 5 and 0 numbers, expected 5 and 4",
        *["the mask allows no choice, or a number is NaN"] * 2,
    ]


def test_files_are_short_and_the_page_says_what_the_policy_takes(folders: list[Path]) -> None:
    assert {each.name for each in folders[1].iterdir()} == RUNTIMES | {
        *("policy.json", "policy.onnx", "vectors.json", "vectors.txt", "README.txt", "LICENSE")
    }
    assert all((folders[1] / name).read_text().count("\n") <= 120 for name in RUNTIMES)
    page = (folders[1] / "README.txt").read_text()
    assert "5 numbers, [5] in C order, with a mask of 5, and gives an action of shape [2]: 0 to 2, 0 to 1" in page
    assert "state [-1, 64]" in page


@pytest.mark.parametrize(
    ("observed", "graph", "reason"), [(FRAME, b"", "convolutions"), (FLAT, b"x", "a network of your own")]
)
def test_what_runtimes_cannot_compute_is_onnx_alone(
    observed: Any, graph: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(observed, CHOICES, False, "algorithm=impala", graph=graph)
    monkeypatch.chdir(tmp_path)
    told = said("export game@1 --to game")
    assert "game@1 is in game-game" in told
    assert f"are left out, as it has {reason}: run policy.onnx" in " ".join(told.split())
    folder = tmp_path / "game-game"
    assert not RUNTIMES & {each.name for each in folder.iterdir()}
    policy = json.loads((folder / "policy.json").read_text())
    assert policy["unsupported"] == f"it has {reason}"
    assert policy["layers"] == []
    assert len(json.loads((folder / "vectors.json").read_text())) == 8
    assert "RUNTIMES" not in (folder / "README.txt").read_text()


@pytest.mark.parametrize("kind", ["no policy", "experience", "mixture", "preprocess"])
def test_what_no_game_can_compute_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    case = CASES["categorical"]
    match kind:
        case "no policy":
            register_module(Pair(), "game")
        case "experience":
            register_module(Pair(), "game", POLICY, {"parent": "grid@2"})
        case "mixture":
            register(*case, members=2)
        case _:
            register_module(Pair(), "game", preprocess="math:floor")
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "out")
    assert (caught.value.field, caught.value.value) == ("model", "game@1")
    assert caught.value.remedy
    assert kind in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


def test_an_onnx_version_keeps_its_opset(folders: list[Path], tmp_path: Path) -> None:
    register_file((folders[0] / "policy.onnx").read_bytes(), "onnx")
    with pytest.raises(ConfigError, match="keeps its own") as caught:
        write(tmp_path / "out", model="pair", to="container", opset=11)
    assert caught.value.field == "opset"


def test_a_run_names_its_policy_and_an_export_of_it_is_replaced(tmp_path: Path) -> None:
    register(*CASES["torque_sac"])
    with shoal.runs.create("loop", "{}") as recorder:
        recorder.record_model("game", 1, ())
    assert write(tmp_path / "out", model=recorder.id).model == "game@1"
    with pytest.raises(ConfigError, match="--replace"):
        write(tmp_path / "out")
    assert write(tmp_path / "out", replace=True).folder == tmp_path / "out"


def test_a_policy_that_samples_may_take_its_best_actions_in_the_game(tmp_path: Path) -> None:
    register(*CASES["categorical"])
    write(tmp_path / "out", action="best")
    assert json.loads((tmp_path / "out" / "policy.json").read_text())["action"] == "best"
