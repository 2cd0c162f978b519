"""A run of ours as a child: gateway and learner as Ray workers, as `shoal run agents` starts them, and who drives it.

    python -m benchmarks.agents.run WAY '{"folder": ..., "spec": {...}, "seed": 0, "client": []}'

WAY: `within` samples in the gateway's process, without HTTP; `driver` is that of `shoal run agents`; `stock` the client
of OpenAI, in a process of .venv-clients. Says its first line when all is up. Then it takes `{"steps": N, "reward": R,
"timeout_s": T}`, learns N steps, or until the last 256 answers have a mean reward of R, and says what was measured.
Seconds begin with the first session.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents.letters import compute_reward, tasks
from benchmarks.children import OUR_PYTHON, ROOT, Child
from benchmarks.talk import commands, say

CLIENTS_PYTHON = str(ROOT / ".venv-clients" / "bin" / "python")
POLL_S, START_S, READY_S = 0.2, 120.0, 240.0
GO = "go"  # a file in the run's folder, for sessions in the gateway's process
TOKEN = os.urandom(16).hex()


def make_spec(folder: Path, algorithm: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The values of an AgentsSpec for the task of `letters`; a session waits for credit as long as it takes."""
    from benchmarks.agents.letters import CLIP, GROUP_SIZE, GROUPS, LEARNING_RATE, MAX_TOKENS

    settings = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS, "learning_rate": LEARNING_RATE, "clip": CLIP}
    return {
        "model": str(folder),
        "algorithm": {"name": "grpo", **settings, **(algorithm or {})},
        "max_tokens": MAX_TOKENS,
        "length": 64,
        "sessions": {"wait_s": 600.0},
        **fields,
    }


async def play_within(front: Any, folder: Path, num_groups: int, group_size: int, seed: int) -> None:
    """Episodes in the gateway's event loop until the run is over: what a session does, without HTTP and JSON."""
    from shoal.extend.serve import Caller
    from shoal.libs.agents.sessions.service import SessionError
    from shoal.libs.agents.sessions.session import Ending, Opening
    from shoal.libs.agents.sessions.texts import SessionTexts
    from shoal.libs.language.engine import Sampling, TextRequest
    from shoal.libs.language.text_model import TextCall

    service, call = front._service, TextCall(Caller(""), is_stream=False)
    while not (folder / GO).exists():
        await asyncio.sleep(POLL_S)
    seeds = itertools.count(seed * 1_000_000)

    async def play(group: str, task: dict[str, Any]) -> None:
        session, _ = await service.open(Opening(group=group, group_size=group_size), "")
        texts = SessionTexts(service, session)
        model = texts.get("model", call.caller)
        prompt = model.continue_chat([{"role": "user", "content": task["prompt"]}], None, {})
        async for _ in model.generate(TextRequest(tuple(prompt), Sampling(temperature=1.0)), call):
            pass
        await service.write_turns(session, texts.turns, "", None)
        answer = service.tokenizer.decode(texts.turns[0].tokens, skip_special_tokens=True)
        await service.end(session.id, Ending(reward=compute_reward(answer, task["data"]["answer"])))

    async def play_groups() -> None:
        for number in seeds:
            await asyncio.gather(*(play(f"g{number}", tasks(number)) for _ in range(group_size)))

    try:
        await asyncio.gather(*(play_groups() for _ in range(num_groups)))
    except SessionError as error:
        if error.code != "run_over":
            raise


def make_within(setting: Any, num_groups: int, group_size: int, seed: int) -> Any:
    """The front of a gateway's setting, which plays by itself."""
    from shoal.libs.agents.sessions.front import AgentsFrontSetting

    @dataclass(frozen=True)
    class WithinSetting(AgentsFrontSetting):
        def open(self, *parts: Any) -> Any:
            front = super().open(*parts)
            asyncio.run_coroutine_threadsafe(play_within(front, self.folder, num_groups, group_size, seed), front._loop)
            return front

    return WithinSetting(**vars(setting))


def run_child(way: str, spec: dict[str, Any], folder: Path, seed: int, *client: str, **asked: Any) -> dict[str, Any]:
    """What a run says, in a child of its own. client: further words for the stock client"""
    setting = {"folder": str(folder / uuid.uuid4().hex[:8]), "spec": spec, "seed": seed, "client": client}
    words = [OUR_PYTHON, "-m", "benchmarks.agents.run", way, json.dumps(setting)]
    with Child(words, folder, {"SHOAL_HOME": str(folder / "home")}, ray_folder=folder / "ray") as child:
        child.answer(READY_S)
        return child.ask(READY_S + asked["timeout_s"], **asked)


class Run:
    """The workers of a run, and what they say."""

    def __init__(self, way: str, asked: dict[str, Any], closing: ExitStack) -> None:
        from shoal.cluster.embedded_cluster import start_cluster

        cluster = closing.enter_context(start_cluster())
        os.environ.update(cluster.environment)  # before anything imports Ray
        from dataclasses import replace

        import ray

        from shoal.cluster.job_main import connect
        from shoal.libs.agents.setting import make_setting
        from shoal.libs.agents.spec import AgentsSpec
        from shoal.rl.ray_workers import ActorLearnerWorkers

        connect()
        closing.callback(ray.shutdown)
        learner = {**asked["spec"].get("learner", {}), "seed": asked["seed"]}
        self.spec = spec = AgentsSpec.parse({**asked["spec"], "learner": learner})
        folder = Path(asked["folder"])
        folder.mkdir(parents=True)
        setting = make_setting(spec, folder, TOKEN, folder.name)
        setting.site.prepare()
        self.num_sessions, self.seed, self.folder = spec.credit, asked["seed"], folder
        self._closing, self._way, self.client_words = closing, way, asked.get("client", [])
        if way == "within":
            size = spec.text_algorithm.group_size
            setting = replace(setting, front=make_within(setting.front, spec.credit // size, size, asked["seed"]))
        self._workers = ActorLearnerWorkers(spec.make_rl_spec(), setting)
        closing.callback(self._workers.close)
        closing.callback(self._workers.close_gateway)
        self._workers.wait_for_gateway()

    def start_driver(self) -> None:
        """Episodes over HTTP, as many at a time as there is credit."""
        if self._way == "within":
            (self.folder / GO).touch()
            return
        url = self._poll()[0]["sessions"]["url"]
        size = str(self.spec.text_algorithm.group_size)
        words = [url, "--agents", str(self.num_sessions), "--group-size", size, "--seed", str(self.seed * 1_000_000)]
        if self._way == "driver":
            command = [sys.executable, "-m", "shoal.libs.agents.driver", *words, "--lifeline"]
            command += ["--env", "benchmarks.agents.letters:grade"]
        else:
            command = [CLIENTS_PYTHON, "-m", "benchmarks.agents.client", *words, *self.client_words]
        driver = Child(command, self.folder, {"SHOAL_TOKEN": TOKEN, "PYTHONDONTWRITEBYTECODE": ""})
        self._closing.callback(driver.close)

    def _poll(self) -> tuple[dict[str, Any], dict[str, Any]]:
        gateway, learner = self._workers.stats()
        assert gateway is not None
        assert learner is not None
        return gateway, learner

    def measure(self, steps: int, reward: float | None, timeout_s: float) -> dict[str, Any]:
        """Learn; see the module."""
        deadline_s = time.monotonic() + START_S
        gateway, learner = self._poll()
        while not gateway["sessions"].get("opened"):
            assert time.monotonic() < deadline_s, "no session was opened"
            time.sleep(POLL_S)
            gateway, learner = self._poll()
        processes = {name: psutil.Process(each["pid"]) for name, each in (("gateway", gateway), ("learner", learner))}
        before = {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
        began_s, first = time.monotonic(), learner["updates"]
        points: list[tuple[int, float, float]] = []  # steps, seconds, reward
        update_s, lags, largest = list[float](), list[float](), [0.0, 0.0]
        while True:
            gateway, learner = self._poll()
            now_s, sessions, metrics = time.monotonic() - began_s, gateway["sessions"], learner["metrics"]
            num_steps = learner["updates"] - first
            if num_steps > (points[-1][0] if points else 0):
                points.append((num_steps, round(now_s, 3), round(sessions["reward"] or 0.0, 4)))
                update_s.append(metrics["learner/update_ms"] / 1e3)
                lags.append(metrics["agents/token_lag_mean"])
                largest[0] = max(largest[0], metrics["agents/token_lag_max"])
                largest[1] = max(largest[1], metrics.get("agents/logprob_diff_max", 0.0))
            is_full = sessions.get("ended", 0) >= sessions["window"]
            is_reached = reward is not None and is_full and sessions["reward"] >= reward
            if is_reached or num_steps >= steps or now_s > timeout_s:
                break
            time.sleep(POLL_S)
        return {
            "steps": num_steps,
            "seconds": now_s,
            "reward": sessions["reward"],
            "is_reached": is_reached,
            "points": points,
            "update_s": sum(update_s) / max(1, len(update_s)),
            "lag_mean": sum(lags) / max(1, len(lags)),
            "lag_max": largest[0],
            "logprob_diff_max": largest[1],
            "cpu_s": {name: sum(each.cpu_times()[:2]) - before[name] for name, each in processes.items()},
            "sessions": {name: each for name, each in sessions.items() if isinstance(each, int | float)},
        }


def main(way: str, asked: dict[str, Any]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as closing:
        run = Run(way, asked, closing)
        say(ready=True)
        command = next(commands())
        run.start_driver()
        say(**run.measure(command["steps"], command.get("reward"), command["timeout_s"]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
