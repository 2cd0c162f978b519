"""The Python of the guides that need a gateway or a run."""

import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal.runs
from blocks import read_blocks, read_files, run_blocks
from rl_setting import TOKEN, serving
from waiting import wait_for


def test_the_python_of_the_command_line_page_runs(shoal_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with shoal.runs.create("docs", "") as recorder:
        recorder.log(10, {"return/mean_100": 12.5, "steps/per_s": 100.0})
    run_blocks("commands.md")
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
    game, actor, local = read_blocks("games/python.md")
    names: dict[str, Any] = {}
    exec(actor, names)
    with serving() as parts, names["ActorClient"](parts.address, TOKEN) as client:
        policy = names["MlpPolicy"](client.spec.policy)
        policy.load(*client.wait_for_weights())
        names["play_one_episode"](client, policy, Game())
        assert client.drain(60)
        assert parts.gateway.stats()["episodes"] == 1
        assert parts.gateway.stats()["steps"] == 20
    exec(read_files("games/python.md")["grid.py"], {})
    del gymnasium.registry["Grid-v0"]  # another test registers it, too
    exec(game, names)
    monkeypatch.setattr("shoal.home.load_access_token", lambda: TOKEN)
    with serving() as parts:
        thread = threading.Thread(target=names["play_matches"], args=[parts.address, Game()])
        thread.start()
        wait_for(lambda: parts.gateway.stats()["episodes"] >= 2)
        parts.gateway.close(finished=True)
        thread.join()
    exec(local, {})
    assert "tcp://127.0.0.1:" in capsys.readouterr().out
