"""An endpoint's process, and workers that share a model, load weights of several files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from gang_models import ThreadLauncher, predictor_of, register_parts, started
from gang_models import register as register_one

from shoal.errors import WeightsError
from shoal.weights import WeightFile, WeightPart


def test_answers_are_those_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = register_one("Transformer")
    version = register_parts(whole, tmp_path, monkeypatch)
    requests = [{"tokens": np.random.default_rng(0).integers(1, 12, (1, 6))} for _ in range(8)]
    expected = predictor_of(whole, None).load(whole.snapshot()).predict_batch(requests)
    alone = predictor_of(version, None).load(version.weight_file()).predict_batch(requests)
    read: dict[int, set[str]] = {}  # by thread
    verify_part = WeightFile.verify_part

    def record(self: WeightFile, part: WeightPart) -> None:
        read.setdefault(threading.get_ident(), set()).add(part.path.name)
        verify_part(self, part)

    monkeypatch.setattr(WeightFile, "verify_part", record)
    with started(ThreadLauncher(), 3) as gang:
        predictor = predictor_of(version, gang)
        shared = predictor.load(version.weight_file()).predict_batch(requests)
        for one, other, found in zip(alone, expected, shared, strict=True):
            np.testing.assert_array_equal(one["logits"], other["logits"])
            np.testing.assert_allclose(found["logits"], other["logits"], rtol=1e-4, atol=1e-5)
        every = {each.file for each in version.manifest.parts}
        assert set.union(*read.values()) == every
        assert max(map(len, read.values())) < len(every)
        damaged = version.weight_file().parts[1].path
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        with pytest.raises(WeightsError, match=f"{damaged.name} is damaged"):
            predictor.load(version.weight_file())  # by the worker that reads it: no worker has the version
        damaged.unlink()
        with pytest.raises(WeightsError, match=f"there is no .*{damaged.name}; .*registry at the same path"):
            predictor.load(version.weight_file())
    with pytest.raises(WeightsError, match=rf"weights version {version.version} cannot be read.*{damaged.name}"):
        predictor_of(version, None).load(version.weight_file())
