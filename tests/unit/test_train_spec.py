"""The fields of a training run, as they are typed."""

from __future__ import annotations

import math

import pytest

from shoal.errors import ConfigError
from shoal.train.spec import TrainSpec


def test_a_target_is_typed_as_it_is_said() -> None:
    for word, parts in [
        ("accuracy>=0.9", ("accuracy", 0.9, "max")),
        ("loss <= 0.1", ("loss", 0.1, "min")),
    ]:
        target = TrainSpec().override([f"stop.target={word}"]).stop.target
        assert target is not None
        assert (target.metric, target.value, target.direction) == parts
    with pytest.raises(ConfigError, match="write it as metric>=value or metric<=value"):
        TrainSpec().override(["stop.target=accuracy"])


def test_money_needs_a_price() -> None:
    with pytest.raises(ConfigError) as raised:
        TrainSpec().override(["stop.money=5"])
    assert str(raised.value) == "TrainSpec: stop.money needs a price_per_device_hour"  # and not the whole spec
    assert TrainSpec().override(["stop.money=5", "price_per_device_hour=2"]).stop.money == 5


def test_plans_are_words_or_degrees_and_a_word_may_be_changed() -> None:
    spec = TrainSpec().override(["parallel=fsdp", "parallel.accumulate=4", "workers=2"])
    assert (spec.parallel.shard, spec.parallel.accumulate) == (True, 4)
    assert spec.degrees().words == "data 2 sharded"
    spec = TrainSpec().override(["parallel={data: 2, tensor: 2}", "workers=4"])
    assert (spec.degrees().data, spec.degrees().tensor) == (2, 2)
    with pytest.raises(ConfigError, match="no such plan; the words are single, ddp"):
        TrainSpec().override(["parallel=dpd"])


def test_a_word_for_the_plan_says_the_degrees_and_nothing_else() -> None:
    before = {"precision": "bf16", "channels_last": True, "shard": True, "tensor": 2, "data": 1, "replicate": 2}
    spec = TrainSpec.parse({"parallel": before}).override(["parallel=pipeline", "parallel.compile=true"])
    assert spec.parallel.model_dump() == {
        **TrainSpec().parallel.model_dump(),
        **{"precision": "bf16", "channels_last": True, "compile": True, "data": 1, "pipeline": None},
    }
    degrees = TrainSpec.parse({"parallel": before}).override(["parallel={shard: true}"])
    assert degrees.parallel.precision == "fp32"  # whoever writes a mapping writes all of it


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("bacth_size=4", "batch_size"),
        ("optimizer.learningrate=1", "learning_rate"),
        ("stop.epoch=1", "epochs"),
        ("batch_size=0", "batch_size"),
        ("workers=two", "workers"),
        ("schedule.name=onecycle", "one_cycle"),
        ("optimizer.learning_rate=.inf", "finite number"),
        ("stop.wall_s=.inf", "finite number"),
        ("stop.target=accuracy>=nan", "finite number"),
        ("stop.convergence={min_improvement: .inf}", "finite number"),
        ("optimizer.betas=[1.5, 2.0]", "less than 1"),
        (f"seed={2**70}", "less than"),
    ],
)
def test_a_word_that_is_wrong_says_what_was_meant(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        TrainSpec().override([word])


def test_without_a_bound_is_a_word_where_it_means_something() -> None:
    spec = TrainSpec().override(["clip_norm=.inf", "checkpoint.every_s=.inf"])
    assert spec.clip_norm == spec.checkpoint.every_s == math.inf
    with pytest.raises(ConfigError, match="clip_norm"):
        TrainSpec().override(["clip_norm=.nan"])


def test_a_spec_comes_back_from_its_record() -> None:
    words = ["task=mine.py:Mine", "args.hidden=8", "stop.target=accuracy>=0.9", "parallel=fsdp", "aliases=[a, b]"]
    spec = TrainSpec().override(words)
    assert TrainSpec.from_yaml(spec.to_yaml()) == spec
