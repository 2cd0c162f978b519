"""The README and the guides: every block of Python runs."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal.runs
from rl_setting import TOKEN, serving
from waiting import wait_for

ROOT = Path(__file__).parents[2]


def blocks(path: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    """In a process of its own, as a notebook or a script runs it: trains, serves, and leaves nothing running."""
    block, play = blocks(ROOT / "README.md", "python")
    compile(play, "README.md", "exec")  # a game's; the guide's is played
    (tmp_path / "readme.py").write_text(block)
    environment = {**os.environ, "SHOAL_HOME": str(tmp_path / "home")}
    command = [sys.executable, "readme.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # Behind it Ray prints that the actor of Serve, which ends itself, has died.
    answer = next(line for line in done.stdout.splitlines() if line.startswith("[["))
    assert float(answer.strip("[]")) == pytest.approx(2.0, abs=0.2)


def test_the_python_of_the_command_line_page_runs(shoal_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shoal.runs.create("docs", "") as recorder:
        recorder.log(10, {"return/mean_100": 12.5, "steps/per_s": 100.0})
    (block,) = blocks(ROOT / "docs/commands.md", "python")
    exec(compile(block, "commands.md", "exec"), {})
    assert "12.5" in capsys.readouterr().out


class Game:
    """What the guide's example takes for granted of a game."""

    def restart(self) -> np.ndarray:
        self.ticks = 0
        return np.zeros(4, np.float32)

    def tick(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        self.ticks += 1
        return np.zeros(4, np.float32), 1.0, self.ticks == 20, False


def test_the_python_of_the_page_for_games_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, game, actor, local = blocks(ROOT / "docs/games/python.md", "python")
    names: dict[str, Any] = {}
    exec(compile(actor, "python.md", "exec"), names)
    with serving() as parts, names["ActorClient"](parts.address, TOKEN) as client:
        policy = names["MlpPolicy"](client.spec.policy)
        policy.load(*client.wait_for_weights())
        names["play_one_episode"](client, policy, Game())
        assert client.drain(60)
        assert parts.gateway.stats()["episodes"] == 1
        assert parts.gateway.stats()["steps"] == 20
    exec(compile(grid, "python.md", "exec"), {})
    del gymnasium.registry["Grid-v0"]  # another test registers it, too
    exec(compile(game, "python.md", "exec"), names)
    monkeypatch.setattr("shoal.home.load_access_token", lambda: TOKEN)
    with serving() as parts:
        thread = threading.Thread(target=names["play_matches"], args=[parts.address, Game()])
        thread.start()
        wait_for(lambda: parts.gateway.stats()["episodes"] >= 2)
        parts.gateway.close(finished=True)
        thread.join()
    exec(compile(local, "python.md", "exec"), {})
    assert "tcp://127.0.0.1:" in capsys.readouterr().out
