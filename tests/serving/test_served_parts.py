"""An endpoint's process, and workers that share a model, load weights of several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_models import ProcessLauncher, ThreadLauncher, predictor_of, started
from gang_models import register as register_one

from shoal.errors import WeightsError
from shoal.registry import ModelVersion, Registry
from shoal.weights import tensor_files
from shoal.weights.tensor_file import read_tensors
from shoal.weights.tensor_files import make_weight_file, write_tensors


def register_parts(whole: ModelVersion, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelVersion:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 4000)
    tensors = read_tensors(whole.weight_file())
    types = {name: (each.dtype, each.shape) for name, each in tensors.items()}
    file = make_weight_file(1, write_tensors(folder / "model.safetensors", types, tensors.items()))
    assert len(file.parts) > 2
    return Registry().register(
        whole.name, file, model=whole.manifest.model, signature=whole.manifest.signature, aliases=()
    )


@pytest.mark.parametrize(
    ("launcher", "size", "split"), [(ThreadLauncher, 3, "pipeline"), (ProcessLauncher, 2, "tensor")]
)
def test_answers_are_those_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Callable[[], Any], size: int, split: str
) -> None:
    whole = register_one("Transformer")
    version = register_parts(whole, tmp_path, monkeypatch)
    requests = [{"tokens": np.random.default_rng(0).integers(1, 12, (1, 6))} for _ in range(8)]
    expected = predictor_of(whole, None).load(whole.snapshot()).predict_batch(requests)
    alone = predictor_of(version, None).load(version.weight_file()).predict_batch(requests)
    with started(launcher(), size, split) as gang:
        predictor = predictor_of(version, gang)
        shared = predictor.load(version.weight_file()).predict_batch(requests)
        for one, other, found in zip(alone, expected, shared, strict=True):
            np.testing.assert_array_equal(one["logits"], other["logits"])
            np.testing.assert_allclose(found["logits"], other["logits"], rtol=1e-4, atol=1e-5)
        damaged = version.weight_file().parts[1].path
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        with pytest.raises(WeightsError, match=f"{damaged.name} is damaged"):
            predictor.load(version.weight_file())
        damaged.unlink()
        with pytest.raises(WeightsError, match=f"{damaged.name} cannot be read.*registry at the same path"):
            predictor.load(version.weight_file())
    with pytest.raises(WeightsError, match=rf"weights version {version.version} cannot be read.*{damaged.name}"):
        predictor_of(version, None).load(version.weight_file())
