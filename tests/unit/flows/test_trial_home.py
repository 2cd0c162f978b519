"""A trial of a sweep on a host that does not see the sweep's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.flows.sweep.trial import TrialSetting, require_shared_home


def test_a_trial_on_a_host_without_the_folder_of_the_sweep_is_an_error(tmp_path: Path) -> None:
    unused: Any = None
    setting = TrialSetting("sweep-1", unused, unused, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"SHOAL_HOME.*has no .*sweep-1 on .*another folder than the driver's"):
        require_shared_home(setting)
    (tmp_path / "runs/sweep-1").mkdir(parents=True)
    require_shared_home(setting)
