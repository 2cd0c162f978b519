"""The fields of a training run, as they are typed."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.libs.population.spec import PopulationSpec
from shoal.rl.spec import RLSpec
from shoal.runs.run_reader import infer_direction
from shoal.serve.spec.model_options import ModelOptions
from shoal.sync.config import AllReduceConfig, SyncConfig
from shoal.train.spec import TrainSpec


def test_a_target_is_typed_as_it_is_said() -> None:
    for word, parts in [("accuracy>=0.9", ("accuracy", 0.9, "max")), ("loss <= 0.1", ("loss", 0.1, "min"))]:
        target = TrainSpec().override([f"stop.target={word}"]).stop.target
        assert (target.metric, target.value, target.direction) == parts
    with pytest.raises(ConfigError, match="write it as metric>=value or metric<=value"):
        TrainSpec().override(["stop.target=accuracy"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("widht=3", "width"), ("workerz=2", "workers"), ("widht.a=3", "width"), ("model.widht=3", "width")],
)
def test_a_mistyped_argument_of_the_task_gets_the_nearest(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def make(width, epoch_size=1):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no such field. did you mean '{meant}'"):
        TrainSpec(task="mine.py:make").override([typed])


def test_money_needs_a_price() -> None:
    with pytest.raises(ConfigError) as raised:
        TrainSpec().override(["stop.money=5"])
    assert str(raised.value) == "TrainSpec = {'stop': {'money': 5}}: stop.money needs a price_per_device_hour"
    assert TrainSpec().override(["stop.money=5", "price_per_device_hour=2"]).stop.money == 5


def test_plans_are_words_or_degrees_and_a_word_may_be_changed() -> None:
    spec = TrainSpec().override(["parallel=fsdp", "parallel.accumulate=4", "workers=2"])
    assert (spec.parallel.shard, spec.parallel.accumulate) == (True, 4)
    assert spec.resolve_dims().description == "data 2 sharded"
    spec = TrainSpec().override(["parallel={data: 2, tensor: 2}", "workers=4"])
    assert (spec.resolve_dims().data, spec.resolve_dims().tensor) == (2, 2)
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


@pytest.mark.parametrize(
    ("metric", "is_more_better"),
    [("accuracy", True), ("validation/F1", True), ("top5_map", True), ("val_nll", False), ("mape", False)],
)
def test_which_way_is_better_is_told_by_a_metrics_name(metric: str, is_more_better: bool) -> None:
    assert infer_direction(metric) == is_more_better
    assert TrainSpec().override([f"stop.convergence.metric={metric}"]).stop.convergence is not None


@pytest.mark.parametrize("what", ["target", "convergence"])
def test_a_metric_whose_name_does_not_tell_needs_a_direction(what: str) -> None:
    words = [f"stop.{what}.metric=uncertainty", *(["stop.target.value=1"] if what == "target" else [])]
    with pytest.raises(ConfigError, match=r"'uncertainty' does not tell whether more is better: say direction="):
        TrainSpec().override(words)
    assert TrainSpec().override([*words, f"stop.{what}.direction=min"])


@pytest.mark.parametrize("value", ["2024-01-01", "{1: a}", "!!binary aGVsbG8=", "[[2024-01-01]]"])
def test_what_would_be_another_value_when_resumed_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"a.* would be another value when the run is resumed"):
        TrainSpec().override([f"args.a={value}"])


def test_arguments_of_a_task_come_back_as_they_were() -> None:
    spec = TrainSpec(
        args={"sizes": (1, 2), "rate": 1e-3, "names": {"a": [None, True]}, "bound": math.inf}, clip_norm=math.inf
    )
    assert spec.args["sizes"] == [1, 2]
    assert TrainSpec.from_yaml(spec.to_yaml()) == spec
    with pytest.raises(ConfigError, match="resumed"):
        TrainSpec.parse({"args": {"a": object()}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": "fsdp", "workers": 2}, "leave out `parallel`"),
        ({"parallel": {"tensor": 2}, "workers": 2}, "leave out `parallel`"),
        ({"average": 0.99}, "average"),
        ({"selective_backprop": {}}, "selective_backprop"),
        ({"workers": 3}, "does not divide by 3"),
        ({"sync": {"kind": "parameter_server", "staleness": 2, "backups": 1}}, "backups"),
        ({"sync": {"staleness": 2}}, r"sync\.staleness=2: all_reduce has none"),
        ({"sync": {"staleness": None}}, r"sync\.staleness=null"),
        ({"sync": {"servers": 2}}, r"sync\.servers=2"),
        ({"sync": {"kind": "parameter_servers"}}, "parameter_server"),
        ({"sync": {"kind": "parameter_server", "servers": 0}}, "servers"),
    ],
)
def test_what_a_parameter_server_cannot_do_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainSpec.parse({"sync": "parameter_server", **changes})


@pytest.mark.parametrize(
    ("fields", "specified"),
    [
        ({"kind": "parameter_server", "every": 4}, r"sync\.every=4: parameter_server has none.*local_sgd or diloco"),
        ({"kind": "local_sgd", "outer_momentum": 0.5}, r"sync\.outer_momentum=0\.5: local_sgd has none.*kind=diloco"),
        ({"kind": "diloco", "hogwild": 2}, r"sync\.hogwild=2: diloco has none.*all_reduce"),
        ({"kind": "diloco", "evry": 2}, r"sync\.evry=2: diloco has none, but servers,.*every,.*leave it out$"),
        ({"kind": "gossip"}, "'gossip' is none of all_reduce, parameter_server, local_sgd, diloco"),
        ({"kind": "shoal.config:Spec"}, "is no subclass of shoal.extend.SyncConfig"),
    ],
)
def test_a_field_of_another_kind_is_rejected_by_name(fields: dict[str, Any], specified: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){specified}"):
        TrainSpec.parse({"sync": fields})
    in_words = specified.replace(r"\.", ".").partition(": ")[2] or specified
    with pytest.raises(ConfigError, match=f"(?s){in_words}|evry.*no such field"):
        TrainSpec().override([f"sync.{name}={value}" for name, value in fields.items()])


def test_a_field_without_its_spec_is_suggested_whatever_kind_has_it() -> None:
    with pytest.raises(ConfigError, match=r"every.*did you mean 'sync\.every'\?"):
        TrainSpec().override(["every=4"])
    with pytest.raises(ConfigError, match=r"sync\.stalenes.*did you mean 'sync.staleness'\?"):
        TrainSpec().override(["sync.stalenes=4"])


def test_the_kind_may_come_after_its_fields() -> None:
    spec = TrainSpec().override(["sync.every=4", "sync.outer_momentum=0.5", "sync.kind=diloco"])
    assert spec.sync == TrainSpec.parse({"sync": {"kind": "diloco", "every": 4, "outer_momentum": 0.5}}).sync
    assert TrainSpec.from_record(spec.to_record()) == TrainSpec.from_yaml(spec.to_yaml()) == spec
    assert "servers" not in spec.to_record()
    other = spec.override(["sync=local_sgd"])
    assert other.sync == TrainSpec.parse({"sync": "local_sgd"}).sync


@pytest.mark.parametrize("words", [["sync=diloco", "sync.every=4"], ["sync.every=4", "sync.kind=diloco"]])
@pytest.mark.parametrize("before", ["all_reduce", {"kind": "parameter_server", "compensation": 0.5}, "local_sgd"])
def test_another_kind_begins_with_its_own_fields(before: Any, words: list[str]) -> None:
    spec = TrainSpec.parse({"sync": before}).override(words)
    assert spec.sync == TrainSpec.parse({"sync": {"kind": "diloco", "every": 4}}).sync
    recorded = TrainSpec.from_record(spec.to_record(), ["sync.kind=parameter_server"])
    assert recorded.sync.kind == "parameter_server", "what the record has of the earlier kind goes with it"


OWN_KIND = f"{__name__}:OwnSync"


class OwnSync(SyncConfig):
    beta: float = 0.1
    token: SecretStr = SecretStr("")

    synchronizer: ClassVar[str] = "none:needed"


def test_the_fields_of_an_own_kind_may_come_before_it_and_its_secrets_are_masked() -> None:
    spec = TrainSpec().override(["sync.beta=0.2", f"sync.kind={OWN_KIND}"])
    assert spec.sync == OwnSync(kind=OWN_KIND, beta=0.2)
    with pytest.raises(ConfigError, match=r"sync\.every = 50: no such field"):
        TrainSpec().override([f"sync.kind={OWN_KIND}", "sync.every=50"])
    for wrong in ({"beta": "much"}, {"every": 51}):
        with pytest.raises(ConfigError) as raised:
            TrainSpec.parse({"sync": {"kind": OWN_KIND, "token": "s3cret", **wrong}})
        assert "s3cret" not in str(raised.value)
    with pytest.raises(ConfigError, match="'missing' is none of") as raised:
        TrainSpec._parse_record({"sync": {"kind": "missing", "token": "s3cret"}}, ["sync.beta=1"])
    assert "s3cret" not in str(raised.value)


def test_a_kind_without_a_synchronizer_is_rejected() -> None:
    with pytest.raises(ConfigError, match="does not say what its synchronizer is"):
        TrainSpec.parse({"sync": "shoal.sync.config:SyncConfig"})


def test_fields_of_other_kinds_in_a_record_have_no_effect_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    own = {"kind": "diloco", "every": 4}
    recorded = {**own, "hogwild": 1, "hogwild_mode": "auto", "compensation": 0.5}
    assert TrainSpec.parse_known({"sync": recorded}, "the record") == TrainSpec.parse({"sync": own})
    assert "sync.hogwild=1, sync.hogwild_mode=auto, sync.compensation=0.5" in caplog.text


def test_a_range_of_workers_is_two_fields() -> None:
    spec = TrainSpec(sync="diloco").override(["workers=[2,4]", "batch_size=64"])
    assert (spec.min_workers, spec.workers) == (2, 4)
    assert TrainSpec.from_yaml(spec.to_yaml()) == spec


def test_a_range_of_workers_makes_synchronous_training_elastic() -> None:
    spec = TrainSpec().override(["workers=[2,4]", "average=0.9"])
    assert spec.has_replicas
    assert spec.applied_sync.kind == "elastic"
    assert TrainSpec(workers=4).applied_sync == AllReduceConfig()
    assert not TrainSpec(workers=4).has_replicas
    with pytest.raises(ConfigError, match=r"workers=\[2,4\]: each worker has the whole model"):
        spec.override(["parallel=fsdp"])


@pytest.mark.parametrize("words", [["workers=[2]"], ["workers=[4,2]"]])
def test_a_range_of_workers_that_does_not_fit_is_rejected(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="workers"):
        TrainSpec(sync="diloco").override([*words, "batch_size=64"])


@pytest.mark.parametrize("device", ["cuda:0", "banana", ""])
@pytest.mark.parametrize(
    ("spec", "field"),
    [(TrainSpec, "device"), (RLSpec, "learner.device"), (PopulationSpec, "device"), (ModelOptions, "device")],
)
def test_a_device_is_a_word(spec: type[Spec], field: str, device: str) -> None:
    changes: dict[str, Any] = {field.rpartition(".")[2]: device}
    if "." in field:
        changes = {field.partition(".")[0]: changes}
    with pytest.raises(ConfigError) as refused:
        spec.parse(changes)
    assert (refused.value.field, refused.value.value) == (field, device)
    assert str(refused.value).removesuffix(". did you mean 'cuda'?").endswith("should be 'auto', 'cpu' or 'cuda'")


@pytest.mark.parametrize(
    ("stop", "metrics", "chosen"),
    [
        ("epochs=1", ("val_acc", "val_loss"), "val_loss"),  # of a LightningModule
        ("epochs=1", ("aux_loss", "loss"), "loss"),
        ("epochs=1", ("a_loss", "b_loss"), "loss"),  # which no version has: the newest is the champion
        ("convergence.metric=val_acc", ("val_acc", "val_loss"), "val_acc"),
    ],
)
def test_versions_are_compared_by_the_only_loss_where_no_metric_is_named(
    stop: str, metrics: tuple[str, ...], chosen: str
) -> None:
    assert TrainSpec().override([f"stop.{stop}"]).choose_criterion(metrics) == (chosen, chosen == "val_acc")
