"""A run of agents on a cluster, with adapters in bf16: a replica samples, its gateway is killed, no token is lost."""

import os
import signal
import threading
from pathlib import Path

from tests.libs.agents.agents_rig import read_counts, save_model
from tests.libs.agents.test_token_tree import make_tokenizer

import shoal.runs
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.libs.agents.flow import run_agents
from shoal.libs.agents.spec import AgentsSpec
from shoal.ray_call import NAMESPACE
from shoal.registry import Registry
from shoal.runs import Run
from waiting import wait_for

TASKS = """
tasks = ["ab", "cd"]

def grade(task, answer):
    return float(len(answer) % 3)
"""
WAIT_S = 300.0


def test_a_killed_gateway_comes_back_and_its_driver_goes_on(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    import ray

    environment = tmp_path / "lengths.py"
    environment.write_text(TASKS)
    model = save_model(tmp_path / "model", make_tokenizer())
    algorithm = {"name": "grpo", "learning_rate": 1e-4, "group_size": 4, "groups_per_step": 2}
    algorithm |= {"lora": {"rank": 2, "modules": ["q_proj"]}, "weights": "bf16"}
    spec = AgentsSpec.parse(
        {
            "model": str(model),
            "name": "lengths",
            "env": f"{environment}:grade",
            "agents": 4,
            "algorithm": algorithm,
            "replicas": 1,
            "replica": {"num_cpus": 0.1},
            "learner": {"num_cpus": 0.1},
            "max_tokens": 6,
            "length": 64,
            "max_steps": 6,
        }
    )
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(run_agents(spec, "agents")))
    thread.start()
    run = wait_for(
        lambda: next((each for each in shoal.runs.list_running() if each.kind == "agents"), None), WAIT_S, "a run"
    )
    gateway = wait_for(lambda: find_actor(f"gateway-{run.id}"), WAIT_S, "its gateway")
    stats = ray.get(gateway.stats.remote())
    wait_for(lambda: read_counts(run.folder).get("learned"), WAIT_S, "a step")
    os.kill(stats["pid"], signal.SIGKILL)
    thread.join(WAIT_S)
    assert ended == [run.id]
    counts = read_counts(run.folder)
    sampled = counts.pop("sampled")
    assert sampled >= sum(counts.values()) > 0
    version = Registry().get("lengths")
    assert version.manifest.files
    assert version.manifest.lineage["base"] == "model-base@1"


def find_run() -> Run | None:
    return next((each for each in shoal.runs.list_running() if each.kind == "agents"), None)


def find_actor(name: str) -> object | None:
    import ray

    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None
