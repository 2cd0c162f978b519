"""Changes lead to the published version bit for bit, or to no version at all."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from shoal.errors import WeightsError
from shoal.weights import WeightSnapshot
from shoal.weights.deltas import RecentDeltas, WeightDelta, follow_deltas

SIZE = 400_000  # of several pieces


def make_versions(rate: float, num: int) -> list[WeightSnapshot]:
    """Versions of bf16 weights that move by about `rate`, as those of AdamW do."""
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.05, (2, SIZE)).astype(np.float32)
    versions = []
    for version in range(1, num + 1):
        rounded = torch.from_numpy(weights).bfloat16().view(torch.int16).numpy().view("V2")
        versions.append(WeightSnapshot.of(version, {"w": rounded, "count": np.array(version)}))
        weights += rate * random.choice([-1, 1], weights.shape).astype(np.float32)
    return versions


def read_bits(snapshot: WeightSnapshot) -> torch.Tensor:
    return safetensors.torch.load(snapshot.payload)["w"].view(torch.int16)


def test_a_payload_of_bf16_is_that_of_safetensors() -> None:
    tensors = {"f": torch.randn(3), "b": torch.randn(2, 3).bfloat16(), "h": torch.randn(4).half(), "n": torch.tensor(7)}
    arrays = {
        name: each.view(torch.int16).numpy().view("V2") if name == "b" else each.numpy()
        for name, each in tensors.items()
    }
    assert WeightSnapshot.of(1, arrays).payload == safetensors.torch.save(tensors)


@pytest.mark.parametrize("rate", [0.0, 1e-6, 1e-5, 3e-5])
def test_changes_lead_to_the_version_bit_for_bit_and_are_smaller_than_their_share(rate: float) -> None:
    old, new = make_versions(rate, 2)
    delta = WeightDelta.between(old, new)
    assert delta is not None
    reached = delta.apply(old)
    assert (reached.payload, reached.version, reached.sha256) == (new.payload, 2, new.sha256)
    share = (read_bits(old) != read_bits(new)).float().mean().item()
    assert len(delta.changes) <= share * len(new.payload) + 100


def test_what_changes_everywhere_has_no_delta() -> None:
    old, new = make_versions(1e-2, 2)
    assert WeightDelta.between(old, new) is None
    floats = [WeightSnapshot.of(version, {"w": np.zeros(9, np.float32)}) for version in (1, 2)]
    assert WeightDelta.between(*floats) is None
    other = WeightSnapshot.of(2, {"w": np.zeros(9, "V2")})
    assert WeightDelta.between(old, other) is None


def test_another_base_or_damage_is_never_a_version() -> None:
    old, new, last = make_versions(1e-5, 3)
    delta = WeightDelta.between(old, new)
    assert delta is not None
    with pytest.raises(WeightsError, match="is not the base"):
        delta.apply(last)
    words = bytearray(old.payload)
    words[-1] ^= 1
    with pytest.raises(WeightsError, match="the checksum does not match"):
        delta.apply(replace(old, payload=bytes(words)))
    for changes in (delta.changes[:-9], WeightDelta.between(new, last).changes):  # type: ignore[union-attr]
        with pytest.raises(WeightsError):
            replace(delta, changes=changes).apply(old)


def test_a_store_leads_on_those_that_have_missed_some() -> None:
    versions, recent = make_versions(1e-6, 5), RecentDeltas()
    for old, new in itertools.pairwise(versions[1:]):
        delta = WeightDelta.between(old, new)
        assert delta is not None
        recent.add(delta, new)
    newest = versions[-1]
    for held, num in ((versions[1], 3), (versions[3], 1)):
        found = recent.find(held.sha256, newest)
        assert not isinstance(found, WeightSnapshot)
        assert len(found) == num
        assert follow_deltas(held, found).payload == newest.payload
    for held_sha256 in ("", versions[0].sha256):
        assert recent.find(held_sha256, newest) is newest
    assert recent.find(versions[1].sha256, versions[3]) is versions[3], "the store holds an older one"
    recent.add(replace(delta, changes=bytes(newest.size_bytes - 9)), newest)
    assert recent.find(versions[1].sha256, newest) is newest, "what leads there is as large"
    recent.clear()
    assert recent.find(versions[3].sha256, newest) is newest
