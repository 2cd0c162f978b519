"""A trial of a sweep on a host that does not see the sweep's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.libs.sweep.trial import TrialSetting, is_remote


def test_a_trial_on_a_host_without_the_folder_of_the_sweep_is_an_error(tmp_path: Path) -> None:
    unused: Any = None
    setting = TrialSetting("sweep-1", unused, unused, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"SHOAL_HOME.*has no .*sweep-1 on .*another folder than the driver's"):
        is_remote(setting)
    (tmp_path / "runs/sweep-1").mkdir(parents=True)
    assert not is_remote(setting)


@pytest.mark.parametrize(("loop", "search"), [(object(), "random"), (None, "pbt")])
def test_a_store_carries_no_trials_of_the_loop_and_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: object, search: str
) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    spec: Any = SimpleNamespace(loop=loop, search=search)
    setting = TrialSetting("sweep-1", spec, spec, tmp_path / "home", tmp_path)
    with pytest.raises(ConfigError, match="trials of the loop, and copies of trials"):
        is_remote(setting)
    assert is_remote(replace(setting, spec=SimpleNamespace(loop=None, search="random")))
