"""The weights of a run on their way from its learner: to the sampler in the gateway's process, and to the registry."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_rig import chat, end, find_url, make_spec, open_run, open_session, save_model
from peft import PeftModel
from test_token_tree import make_tokenizer
from transformers import AutoModelForCausalLM

from shoal.libs.agents.model import describe, register
from shoal.libs.hf.transfer import push
from shoal.loaded import load
from shoal.rl.local_loop import LocalLoop
from shoal.weights.tensor_files import read_tensors

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_tokenizer())


def make_fields(**algorithm: Any) -> dict[str, Any]:
    sizes = {"group_size": 2, "groups_per_step": 2, "learning_rate": 1e-2}
    return {"algorithm": {"name": "grpo", **sizes, **algorithm}, "learner": {"publish_interval_s": 0}}


def play(url: str, number: int) -> None:
    """Two sessions of a group, with other rewards."""
    sessions = [open_session(url, group=f"g{number}", group_size=2) for _ in range(2)]
    for reward, session in enumerate(sessions):
        chat(session, "ab")
        assert end(url, session, reward=float(reward)).status == 200


def learn(loop: LocalLoop, steps: int) -> list[float]:
    """Take steps, one after the other; |log p of the trainer - log p of the sampler| of each."""
    url, found = find_url(loop), []
    for step in range(steps):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(play, (url, url), (2 * step, 2 * step + 1)))
        deadline_s = time.monotonic() + 60
        while (
            loop.gateway.stats()["sessions"].get("steps", 0) <= step
            or loop.gateway.stats()["weights_version"] < step + 2
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        found.append(loop.learner.stats()["metrics"]["agents/logprob_diff_mean"])
    return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # which peft reads
def test_a_version_of_adapters_is_these_alone(model: Path, tmp_path: Path) -> None:
    """For the sampler, which has their base, and for the registry, as those that were fine-tuned."""
    fields = make_fields(lora={"rank": 2, "modules": ["q_proj", "down_proj"], "alpha": 16})
    spec = make_spec(model, max_version_lag=0, name="sorted", **fields)
    with open_run(spec, tmp_path / "run") as loop:
        differences = learn(loop, STEPS)
        snapshot = loop.learner.pause()
    assert max(differences) <= 1e-5
    tensors = read_tensors(snapshot)
    assert len(tensors) == 4
    assert all("lora_" in name for name in tensors)
    assert any(each.any() for name, each in tensors.items() if "lora_B" in name)

    described = describe(spec.text_algorithm)
    version = register(described, "sorted", snapshot)
    ids = torch.arange(12)[None] % 7
    answered = load(version.ref).model(ids, torch.ones_like(ids)).detach()
    push(version, tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = base(ids).logits.detach()
    expected = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(ids).logits.detach()
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(answered, expected, atol=1e-5, rtol=0)
    assert version.manifest.lineage["base"].endswith("-base@1")
    assert register(described, "sorted", snapshot).manifest.lineage == version.manifest.lineage


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "modules": ["q_proj"]}])
def test_versions_in_bf16_are_sampled_with_and_registered_as_such(
    lora: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    fields = make_fields(weights="bf16", lora=lora)
    spec = make_spec(model, max_version_lag=0, **fields)
    with open_run(spec, tmp_path / "run") as loop:
        differences = learn(loop, STEPS)
        snapshot = loop.learner.pause()
        own = loop.learner.model.state_dict()
    assert all(0 < each < 0.05 for each in differences), "the trainer computes in float32"
    published = read_tensors(snapshot)
    assert published.keys() == own.keys()
    assert all(torch.equal(each, own[name].bfloat16()) for name, each in published.items())
    version = register(describe(spec.text_algorithm), "rounded", snapshot)
    network = load(version.ref).model
    assert {each.dtype for each in network.state_dict().values()} == {torch.bfloat16}
    assert network(torch.arange(6)[None], torch.ones(1, 6)).isfinite().all()
