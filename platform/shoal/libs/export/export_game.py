"""Writes a policy into a folder for a game: policy.json, test vectors, and a runtime in each language.

Called by `export_model`, which writes policy.onnx.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import msgspec

from shoal.extend.registry import ModelVersion
from shoal.libs.export.examples import Predict
from shoal.libs.export.folder import copy_license
from shoal.libs.export.game_policy import GamePolicy, compare_vectors, describe_policy, make_vectors
from shoal.wire.experience_spec import ExperienceSpec

ONNX_FILE, OPSET = "policy.onnx", 15  # Unity's engine reads 7 to 15
RUNTIMES = ("Policy.gd", "PolicyLayer.gd", "policy.mjs", "Policy.cs", "policy.hpp")


def write_game(
    folder: Path,
    version: ModelVersion,
    experience: ExperienceSpec,
    registered: Predict,
    tolerance: float,
    action: str | None,
) -> tuple[int, float, str]:
    """Write what is beside policy.onnx. Raises ConfigError. action: how the runtimes act at first; None: as registered

    Returns the number of vectors, the largest difference from the registered model's outputs, and why the runtimes are
    left out, or "".
    """
    policy, difference = describe_policy(version, experience, action), 0.0
    vectors = make_vectors(policy, registered)
    texts = files("shoal.libs.export") / "game"
    if not policy.unsupported:
        difference = compare_vectors(experience, version, vectors, tolerance)
        for name in RUNTIMES:
            (folder / name).write_bytes((texts / name).read_bytes())
    encode = msgspec.json.encode
    (folder / "policy.json").write_bytes(msgspec.json.format(encode(policy)) + b"\n")
    (folder / "vectors.json").write_bytes(b"[\n" + b",\n".join(map(encode, vectors)) + b"\n]\n")
    (folder / "README.txt").write_text(_format_page((texts / "README.txt").read_text(), policy, version))
    copy_license(folder)
    return len(vectors), difference, policy.unsupported


def _format_page(text: str, policy: GamePolicy, version: ModelVersion) -> str:
    signature = version.manifest.signature
    tensors = [
        ", ".join(f"{each.name} {each.shape}" for each in side) for side in (signature.inputs, signature.outputs)
    ]
    bounds = ", ".join(f"{low:g} to {high:g}" for low, high in zip(policy.action_low, policy.action_high, strict=True))
    takes = f"{policy.observation_size} numbers, {list(policy.observation.shape)} in C order"
    gives = bounds or ", ".join(f"0 to {size - 1}" for size in policy.action_sizes)
    page = text if not policy.unsupported else text.partition("RUNTIMES")[0]
    return page.format(
        name=policy.name,
        version=policy.version,
        takes=takes + (f", with a mask of {policy.mask_size}" if policy.mask_size else ""),
        gives=f"an action of shape {policy.action_shape}: {gives}" if policy.action_shape else f"one of {gives}",
        tensors=" -> ".join(tensors),
        contents="sizes, bounds and weights, for the runtimes below"
        if not policy.unsupported
        else f"sizes and bounds; no weights and no runtimes, as {policy.unsupported}",
        shape=", ".join(map(str, policy.observation.shape)),
        unity_type="float" if policy.action_low else "int",
        action=policy.action,
    )
