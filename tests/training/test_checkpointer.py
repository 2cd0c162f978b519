"""The Checkpointer in one process: what comes back, what is kept, what is refused."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from blocks import run_blocks
from shoal.checkpoint import Checkpointer
from shoal.errors import CheckpointError, ConfigError, SpecMismatch
from training.checkpoint_states import Copying, Gate, assert_equal, names, newest, state_of
from waiting import wait_for


def test_everything_comes_back_exactly(checkpointer: Checkpointer) -> None:
    assert checkpointer.latest() is None
    extras = {"position": 12, "history": [1.5, float("nan")], "order": torch.arange(4), "table": {3: (b"x", None)}}
    per_rank = {"torch": torch.get_rng_state(), "python": random.getstate()}
    checkpointer.save(7, state_of(7), extras, per_rank=per_rank, plan="fsdp")
    found = newest(checkpointer)
    assert (found.step, found.plan, found.world_size, found.damaged) == (7, "fsdp", 1, [])
    state = state_of(0)
    weight = state["model"]["layer.weight"]
    got = checkpointer.load(found, state)
    assert_equal(state, state_of(7))
    assert state["model"]["layer.weight"] is weight  # in place
    assert (got.step, got.extras["position"], got.extras["table"]) == (7, 12, {3: (b"x", None)})
    assert str(got.extras["history"]) == "[1.5, nan]"
    assert_equal(got.extras["order"], torch.arange(4))
    assert got.own == got.per_rank[0]
    assert_equal(got.per_rank[0]["torch"], per_rank["torch"])
    random.setstate(got.per_rank[0]["python"])


def test_a_shard_is_a_safetensors_file(checkpointer: Checkpointer) -> None:
    checkpointer.save(7, state_of(7))
    with safe_open(newest(checkpointer).path / "shard-00000-of-00001.safetensors", "pt") as shard:
        assert torch.equal(shard.get_tensor("model.layer.weight@0,0"), torch.full((3, 5), 7.0))
        assert shard.get_tensor("model.layer.half@0,0").dtype == torch.bfloat16


def test_the_newest_and_the_best_are_kept(checkpointer: Checkpointer) -> None:
    assert checkpointer.best() is None
    for step in range(1, 6):
        checkpointer.save(step, state_of(step), best=step in (1, 2))
    assert names(checkpointer) == ["best.json", "step-000000002", "step-000000004", "step-000000005"]
    best = checkpointer.best()
    assert best.step == 2
    checkpointer.save(6, state_of(6), best=True)
    assert names(checkpointer) == ["best.json", "step-000000005", "step-000000006"]


def test_going_back_gives_up_what_came_later(checkpointer: Checkpointer) -> None:
    for step in (90, 100):
        checkpointer.save(step, state_of(step), best=True)
    assert checkpointer.find(90).step == 90
    checkpointer.save(95, state_of(95))
    assert names(checkpointer) == ["best.json", "step-000000090", "step-000000095"]
    assert checkpointer.best() is None
    checkpointer.save(95, state_of(96))  # the same step again
    state = state_of(0)
    checkpointer.load(newest(checkpointer), state)
    assert_equal(state, state_of(96))
    with pytest.raises(CheckpointError, match=r"step-000000091 in .* there is no such checkpoint"):
        checkpointer.find(91)


def test_the_state_may_change_when_save_returns(checkpointer: Checkpointer, gate: Gate) -> None:
    state = state_of(1)
    checkpointer.save(1, state)
    state["model"]["layer.weight"].fill_(99.0)
    state["optimizer"]["param_groups"][0]["lr"] = 99.0
    gate.open.set()
    loaded = state_of(0)
    checkpointer.load(newest(checkpointer), loaded)
    assert_equal(loaded, state_of(1))


def test_what_is_copied_later_may_change_once_it_is(checkpointer: Checkpointer, copying: Copying) -> None:
    state = state_of(1)
    checkpointer.save(1, state, later=["optimizer"])
    state["model"]["layer.weight"].fill_(99.0)
    waiting = threading.Thread(target=checkpointer.wait_until_copied)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    copying.go.set()
    waiting.join()
    state["optimizer"]["state"][0]["exp_avg"].fill_(99.0)
    loaded = state_of(0)
    checkpointer.load(newest(checkpointer), loaded)
    assert_equal(loaded, state_of(1))
    checkpointer.wait_until_copied()  # nothing is in flight


def test_a_copy_that_takes_too_long_is_said(tmp_path: Path, copying: Copying) -> None:
    with Checkpointer(tmp_path, timeout_s=0.1) as checkpointer:
        checkpointer.save(1, state_of(1), later=["optimizer"])
        with pytest.raises(CheckpointError, match=r"the state was not copied within 0\.1 s"):
            checkpointer.wait_until_copied()
        checkpointer._timeout_s = 60.0  # enough, however busy the machine is
        copying.go.set()
        checkpointer.wait_until_copied()


def test_a_second_save_waits_for_the_first(checkpointer: Checkpointer, gate: Gate) -> None:
    checkpointer.save(1, state_of(1))
    second = threading.Thread(target=checkpointer.save, args=(2, state_of(2)))
    second.start()
    wait_for(lambda: checkpointer._in_flight is None, what="the second save in wait()")
    gate.open.set()
    second.join()
    for step in (1, 2):
        state = state_of(0)
        checkpointer.load(checkpointer.find(step), state)
        assert_equal(state, state_of(step))


def test_a_save_that_is_waited_for_copies_nothing(tmp_path: Path, checkpointer: Checkpointer) -> None:
    with Checkpointer(tmp_path / "direct", asynchronous=False) as direct:
        for each in (direct, checkpointer):
            each.save(1, state_of(1), later=["optimizer"])
            each.wait()
        assert not hasattr(direct._staging, "_buffer")
        [one], [other] = (sorted((each.folder).rglob("shard-*")) for each in (direct, checkpointer))
        assert one.read_bytes() == other.read_bytes()
        loaded = state_of(0)
        direct.load(newest(direct), loaded)
        assert_equal(loaded, state_of(1))


def test_tensors_larger_than_a_block_and_turned_ones(checkpointer: Checkpointer) -> None:
    generator = torch.Generator().manual_seed(0)
    big = {name: torch.randn(size, generator=generator) for name, size in {"a": 7_000, "b": 6 << 20, "c": 333}.items()}
    turned = torch.randn(3 << 10, 2 << 10, generator=generator).T
    for state in ({"model": big}, {"model": {"turned": turned, "last": torch.ones(2)}}):
        checkpointer.save(1, state)
        loaded = {"model": {name: torch.zeros_like(one) for name, one in state["model"].items()}}
        checkpointer.load(newest(checkpointer), loaded)
        assert_equal(loaded, state)


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        (lambda state: state["model"].update(extra=torch.ones(1)), "model.extra", "is not in step-000000001"),
        (lambda state: state["model"].pop("count"), "model.count", "the state has no place for it"),
        (lambda state: state["optimizer"]["param_groups"][0].pop("lr"), "optimizer.param_groups.0.lr", "no place"),
        (lambda state: state["model"].update(count=torch.ones(2)), "model.count", r"is I64 \[\] in"),
        (lambda state: state["model"].update(count=torch.tensor(1.0)), "model.count", r"is I64 \[\] in"),
        (lambda state: state["model"].update(count=torch.tensor(1, device="meta")), "model.count", "is I64"),
        (lambda state: state["model"].update(count=1), "model.count", "is a tensor in"),
        (lambda state: state.update(best=torch.ones(1)), "best", "is not a tensor in"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_changes(
    checkpointer: Checkpointer, change: Callable[[dict[str, Any]], object], field: str, problem: str
) -> None:
    checkpointer.save(1, state_of(1), plan="ddp")
    state = state_of(0)
    change(state)
    with pytest.raises(SpecMismatch, match=problem) as caught:
        checkpointer.load(newest(checkpointer), state)
    assert caught.value.field == field
    assert torch.equal(state["model"]["layer.weight"], torch.zeros(3, 5))


def test_a_part_of_the_state_can_be_loaded(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    state = {"model": state_of(0)["model"]}
    checkpointer.load(newest(checkpointer), state)
    assert_equal(state["model"], state_of(1)["model"])


@pytest.mark.parametrize(
    ("state", "field"),
    [
        ({"model": {"w": torch.ones(1, dtype=torch.complex128)}}, "model.w"),
        ({"model": {"w": torch.ones(1, device="meta")}}, "model.w"),
        ({"model": {"w": torch.ones(2).to_sparse()}}, "model.w"),
        ({"model": nn.Linear(1, 1)}, "model"),
        ({"a": [(1, object())]}, "a.0.1"),
        ({"a": {"b": 1}, "a.b": 2}, "a.b"),
        ({"a": (torch.ones(2).to_sparse(), 1)}, "a.0"),
        ({"a": (torch.ones(1, device="meta"), 1)}, "a.0"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(
    checkpointer: Checkpointer, state: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpointer.save(1, state)
    assert caught.value.field == field
    assert checkpointer.latest() is None


@pytest.mark.parametrize("step", [1.5, "1", None, 2**63])
def test_a_step_that_is_no_whole_number_is_refused(checkpointer: Checkpointer, step: Any) -> None:
    with pytest.raises(ConfigError, match=r"step = .*: is (no whole number|beyond)"):
        checkpointer.save(step, state_of(1))


def test_a_step_below_0_is_refused(checkpointer: Checkpointer) -> None:
    with pytest.raises(ConfigError, match="step = -1: is below 0"):
        checkpointer.save(-1, state_of(1))
    checkpointer.save(0, state_of(1))
    assert newest(checkpointer).step == 0


def test_nothing_on_disk_is_a_pickle(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1), {"generator": torch.get_rng_state()}, per_rank={"python": random.getstate()})
    for path in newest(checkpointer).path.iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=pytest.fail)  # nor JSON that only Python reads


def test_the_pages_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks("checkpoints.md")
    assert capsys.readouterr().out == "10 640 tensor([1., 1., 1.])\n3 True\n"
