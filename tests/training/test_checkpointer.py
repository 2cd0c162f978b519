"""The Checkpointer in one process: what comes back, what is kept, what damage and full disks do."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from shoal.checkpoint import Checkpointer, Found, folder
from shoal.errors import CheckpointError, Closed, ConfigError, SpecMismatch
from waiting import wait_for


def state_of(number: float, width: int = 5) -> dict[str, Any]:
    return {
        "model": {
            "layer.weight": torch.full((3, width), number),
            "layer.mask": torch.tensor([True, False, True]),
            "layer.half": torch.full((2, 2), number, dtype=torch.bfloat16),
            "count": torch.tensor(int(number)),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(number), "exp_avg": torch.full((3, width), -number).T}},
            "param_groups": [{"lr": number / 7, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "best": float("inf"),
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "checkpoints", keep=2) as opened:
        yield opened


def newest(checkpointer: Checkpointer) -> Found:
    found = checkpointer.latest()
    assert found is not None
    return found


def names(checkpointer: Checkpointer) -> list[str]:
    checkpointer.wait()
    return sorted(path.name for path in checkpointer.folder.iterdir())


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
    assert best is not None
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a shard": (lambda path: next(path.glob("shard-*")).write_bytes(b"half"), "shard-.* has 4 bytes instead of"),
    "a flipped bit": (lambda path: flip(next(path.glob("shard-*"))), "shard-.* does not match its checksum"),
    "no shard": (lambda path: next(path.glob("shard-*")).unlink(), "shard-.* cannot be read .No such file"),
    "a flipped bit in the index": (lambda path: flip(path / "index.json"), "index.json does not match its checksum"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read .No such file"),
    "garbage": (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00garbage"), "manifest.json is not JSON"),
    "another manifest": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not one of format"),
    "a changed manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"step": 2', '"step": 3')
        ),
        "manifest.json does not match its own checksum",
    ),
    "another name": (lambda path: path.rename(path.with_name("step-000000003")), "manifest.json is of step 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_reason_and_the_one_before_is_used(
    checkpointer: Checkpointer, kind: str
) -> None:
    checkpointer.save(1, state_of(1))
    checkpointer.save(2, state_of(2))
    path = newest(checkpointer).path
    inflict, reason = DAMAGES[kind]
    inflict(path)
    found = newest(checkpointer)
    assert found.step == 1
    (damage,) = found.damaged
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(damage)
    assert damage.startswith("step-00000000")
    state = state_of(0)
    checkpointer.load(found, state)
    assert_equal(state, state_of(1))
    checkpointer.save(2, state_of(3))  # a good one takes the bad one's place
    assert newest(checkpointer).damaged == []


def test_nothing_but_damage_is_an_error(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    (newest(checkpointer).path / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000000001: index\.json cannot be read"):
        checkpointer.latest()


@pytest.mark.parametrize("full", ["shard", "index.json", "manifest.json"])
def test_a_full_disk_is_said_by_the_next_save_and_the_older_checkpoint_stays(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    with monkeypatch.context() as patch:  # a file of which the kernel says that there is no space left
        if full == "shard":
            patch.setattr("shoal.checkpoint.shards.shard_name", lambda rank, size: "/dev/full")
        else:
            name = "INDEX" if full == "index.json" else "MANIFEST"
            patch.setattr(f"shoal.checkpoint.record.{name}", "/dev/full")
        checkpointer.save(2, state_of(2, width=6))  # another shape: planned anew
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left on device"):
            checkpointer.save(3, state_of(3))
    assert names(checkpointer) == ["step-000000001"]
    assert newest(checkpointer).step == 1
    checkpointer.save(3, state_of(3))
    assert newest(checkpointer).step == 3


def test_a_disk_that_fills_up_in_the_middle_of_a_shard(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        checkpointer.save(2, state_of(2) | {"big": torch.zeros(5 << 20, dtype=torch.uint8)})
        with pytest.raises(CheckpointError, match="step 2 could not be saved"):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(checkpointer) == ["step-000000001"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file", asynchronous=False)
    with pytest.raises(CheckpointError, match="step 1 could not be saved"):
        checkpointer.save(1, state_of(1))
    checkpointer.close()


def test_a_folder_that_is_not_shared_is_said(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "write_file", lambda path, pieces: folder.FileSum(0, ""))  # on another disk
    checkpointer.save(1, state_of(1))
    with pytest.raises(CheckpointError, match="rank 0 does not see the shard of rank 0"):
        checkpointer.wait()


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", range(6))
def test_a_crash_at_any_moment_leaves_the_checkpoint_before_or_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        passed = iter(range(100))

        def crash_here(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*words: Any) -> Any:
                if next(passed) == point:
                    raise Crash
                return real(*words)

            return wrapped

        with monkeypatch.context() as patch:
            for name in ("write_file", "sync_folder", "tidy"):
                patch.setattr(folder, name, crash_here(getattr(folder, name)))
            checkpointer.save(2, state_of(2))
            with pytest.raises(Crash):
                checkpointer.wait()
    with Checkpointer(tmp_path, keep=1) as again:
        found = newest(again)
        assert (found.step, found.damaged) == (1 if point < 4 else 2, [])
        state = state_of(0)
        again.load(found, state)
        assert_equal(state, state_of(found.step))
        again.save(3, state_of(3))
        assert names(again) == ["step-000000003"]  # nothing is left of the draft


class Gate:
    """Holds the background thread in front of a shard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = folder.write_file
        monkeypatch.setattr(folder, "write_file", lambda *words: self.open.wait(10.0) and real(*words))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_the_state_may_change_when_save_returns(checkpointer: Checkpointer, gate: Gate) -> None:
    state = state_of(1)
    checkpointer.save(1, state)
    state["model"]["layer.weight"].fill_(99.0)
    state["optimizer"]["param_groups"][0]["lr"] = 99.0
    gate.open.set()
    loaded = state_of(0)
    checkpointer.load(newest(checkpointer), loaded)
    assert_equal(loaded, state_of(1))


def test_a_second_save_waits_for_the_first(checkpointer: Checkpointer, gate: Gate) -> None:
    checkpointer.save(1, state_of(1))
    second = threading.Thread(target=checkpointer.save, args=(2, state_of(2)))
    second.start()
    wait_for(lambda: checkpointer._flying is None, what="the second save in wait()")
    gate.open.set()
    second.join()
    for step in (1, 2):
        state = state_of(0)
        checkpointer.load(checkpointer.find(step), state)
        assert_equal(state, state_of(step))


def test_a_save_that_does_not_end_is_an_error_after_the_timeout(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path, timeout_s=0.01) as checkpointer:
        checkpointer.save(1, state_of(1))
        with pytest.raises(CheckpointError, match=r"has not ended within 0\.01 s"):
            checkpointer.wait()
        gate.open.set()
        wait_for(lambda: checkpointer._flying and checkpointer._flying.done(), what="the save")


def test_preparing_allocates_what_every_save_uses(checkpointer: Checkpointer) -> None:
    checkpointer.prepare(state_of(0))
    assert checkpointer._staging is not None
    buffer = checkpointer._staging._buffer.data_ptr()
    for step in (1, 2):
        checkpointer.save(step, state_of(step))
    assert checkpointer._staging._buffer.data_ptr() == buffer


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
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(
    checkpointer: Checkpointer, state: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpointer.save(1, state)
    assert caught.value.field == field
    assert checkpointer.latest() is None


def test_nothing_on_disk_is_a_pickle(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1), {"generator": torch.get_rng_state()}, per_rank={"python": random.getstate()})
    for path in newest(checkpointer).path.iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=pytest.fail)  # nor JSON that only Python reads


def test_close_waits_says_what_failed_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state_of(1))
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(Closed):
        checkpointer.save(2, state_of(2))
    with Checkpointer(tmp_path) as again:
        assert newest(again).step == 1
    monkeypatch.setattr("shoal.checkpoint.record.INDEX", "/dev/full")
    with pytest.raises(CheckpointError, match="No space left"), Checkpointer(tmp_path) as failing:
        failing.save(2, state_of(2))
    failing = Checkpointer(tmp_path)
    failing.save(2, state_of(2))
    failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # hides nothing more important
    with pytest.raises(ConfigError, match="keep"):
        Checkpointer(tmp_path, keep=0)


def test_the_pages_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, page.name, "exec"), {})
    assert capsys.readouterr().out == "10 640 tensor([1., 1., 1.])\n"
