"""Pictures that arrive through a broker train LeNet: none is lost, and none counts twice, however the process ends."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal.runs
from broker_rig import publish_all
from message_task import IMAGE_BYTES, decode, make_source
from shoal.data import Data, Loader, LoaderSpec
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import load_first_batch
from shoal.errors import ConfigError, DataError
from shoal.libs.stream.mqtt import PrivateBroker
from shoal.runs import Status
from shoal.sources import MqttSource, MqttSpec
from shoal.sources.source import Delivery, MalformedPayload, Sample, StreamState
from shoal.train.__main__ import main
from shoal.train.launch.local import fit_locally
from shoal.train.launch.validate import validate_run
from shoal.train.spec import TrainSpec
from waiting import wait_for

TASK = Path(__file__).parents[1] / "message_task.py"
BATCH, STEPS = 8, 24
NUMBERS = range(1, STEPS * BATCH + 1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateBroker]:
    with PrivateBroker(tmp_path_factory.mktemp("broker")) as started:
        yield started


def publish(broker: PrivateBroker, topic: str, numbers: range) -> None:
    """Picture `number` has its number in the first pixels; its class is its last digit."""
    pictures = ((f"{topic}/{each % 10}", bytes(divmod(each, 256)).ljust(IMAGE_BYTES, b"\0"), each) for each in numbers)
    publish_all(broker.address, pictures)


def publish_retained(broker: PrivateBroker, topic: str) -> None:
    """A message that everybody gets who subscribes later."""
    publish_all(broker.address, [(topic, bytes(IMAGE_BYTES), None)], retain=True)


def begin_session(broker: PrivateBroker, name: str) -> None:
    """The broker holds messages from now on. The checks before a run find a retained example."""
    publish_retained(broker, f"{name}/0")
    source = make_source(broker.address, name)
    source.open(StreamState())
    source.close()


def make_spec(broker: PrivateBroker, name: str, folder: Path, *words: str) -> TrainSpec:
    args = [f"args.broker={broker.address}", f"args.name={name}", f"args.notes={folder / 'notes'}"]
    sizes = [f"batch_size={BATCH}", f"stop.steps={STEPS}", "checkpoint.every_steps=3", "log_every_steps=1", "threads=1"]
    return TrainSpec().override([f"task={TASK}:Pictures", *args, *sizes, *words])


def read_notes(folder: Path) -> list[list[int]]:
    """The numbers of the pictures of each step that was taken. 0 is the example, of checks before the run."""
    steps = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return [step for step in steps if 0 not in step]


def test_lenet_learns_from_pictures_of_a_broker_and_a_kill_loses_none(broker: PrivateBroker, tmp_path: Path) -> None:
    begin_session(broker, "killed")
    publish(broker, "killed", NUMBERS)
    spec = make_spec(broker, "killed", tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "shoal.train"]
    first = [f"task={TASK}:Pictures", *spec_words(spec), "args.wait_at=14"]
    with subprocess.Popen([*words, *first], env=environment) as process:
        wait_for(lambda: (tmp_path / "notes").exists() and len(read_notes(tmp_path)) >= 14, what="fourteen steps")
        process.kill()
    before = shoal.runs.load("latest")
    taken = read_notes(tmp_path)
    (tmp_path / "notes").unlink()
    assert main([f"resume={before.id}", "args.wait_at=0"]) == 0
    run = shoal.runs.load("latest")
    assert (run.id, run.status) == (before.id, Status.FINISHED)
    restored = run.last_events()["restored"]["step"]
    assert 0 < restored <= 14
    again = read_notes(tmp_path)
    learnt = Counter(number for step in [*taken[:restored], *again] for number in step)
    assert learnt == Counter(NUMBERS), "of the weights that are kept, each picture is in one step"
    publish(broker, "killed", range(900, 908))
    source = make_source(broker.address, "killed")
    source.open(StreamState())
    assert [int(each.value[2]) for each in source.poll(100, 600).messages] == list(range(900, 908)), (
        "all is acknowledged"
    )
    source.close()


def spec_words(spec: TrainSpec) -> list[str]:
    """As a user would type them."""
    names = [f"args.{name}={value}" for name, value in spec.args.items()]
    sizes = [f"batch_size={spec.batch_size}", f"stop.steps={spec.stop.steps}", "threads=1", "log_every_steps=1"]
    return [*names, *sizes, f"checkpoint.every_steps={spec.checkpoint.every_steps}"]


def test_it_is_stopped_in_order_and_goes_on(broker: PrivateBroker, tmp_path: Path) -> None:
    begin_session(broker, "stopped")
    publish(broker, "stopped", NUMBERS)
    half = fit_locally(make_spec(broker, "stopped", tmp_path, "stop.steps=10"), registers=False, predicts=False)
    assert half.steps == 10
    spec = make_spec(broker, "stopped", tmp_path, "stop.steps=14")
    fit_locally(spec, registers=False, predicts=False)  # another run: what was learnt does not come to it
    numbers = [number for step in read_notes(tmp_path) for number in step]
    assert numbers == list(NUMBERS)


class Memory:
    """A source of a list, which may be restarted."""

    is_exhausted, never_ends = False, False
    max_unacknowledged: int | None = None

    def __init__(self, *messages: Sample | MalformedPayload) -> None:
        self._messages = list(messages)
        self._at = 0
        self._committed = 0
        self.num_delivered, self.commits = 0, list[StreamState]()

    def example(self) -> Sample:
        return next(each for each in self._messages if isinstance(each, Sample))

    def open(self, state: StreamState) -> None:
        self._at = self._committed

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        taken = self._messages[self._at : self._at + max_messages]
        self._at += len(taken)
        self.num_delivered += len(taken)
        self.is_exhausted = self._at == len(self._messages) and not self.never_ends
        samples = [each for each in taken if isinstance(each, Sample)]
        return Delivery(samples, [each for each in taken if isinstance(each, MalformedPayload)])

    def commit(self, state: StreamState) -> None:
        self.commits.append(state)

    def close(self) -> None:
        self.is_exhausted = False


def samples(*sequences: int) -> list[Sample]:
    return [Sample(torch.tensor(each), "p", each) for each in sequences]


def test_a_batch_is_of_new_messages_in_their_order_and_only_what_is_saved_is_committed() -> None:
    bad = MalformedPayload("t", "is no picture", "x")
    source = Memory(*samples(1, 2), bad, *samples(2, 3, 4, 5))
    with Loader(source, batch_size=2) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [1, 2]
        saved = loader.state_dict()
        assert next(batches).tolist() == [3, 4]
        assert source.commits == []
        loader.commit(saved)
        loader.commit(loader.state_dict())
    first, second = source.commits
    assert first.num_delivered <= 3, "2, and at most what is malformed before the next"
    assert (first.sequences, second.sequences) == ({"p": 2}, {"p": 4})
    with Loader(source, batch_size=2) as again:  # of the next process, to which all comes again
        again.load_state_dict(saved)
        assert next(iter(again)).tolist() == [3, 4]


def test_what_a_loaded_state_has_learnt_is_acknowledged_at_once() -> None:
    """Else a broker that sends so many ahead, and no more, would wait for ever."""
    source = Memory(*samples(*range(1, 9)))
    with Loader(source, batch_size=4) as loader:
        next(iter(loader))
        saved = loader.state_dict()
    again = Memory(*samples(*range(1, 9)))
    with Loader(again, batch_size=2) as loader:
        loader.load_state_dict({**saved, "states": saved["states"]})
        assert next(iter(loader)).tolist() == [5, 6]
    assert not again.commits, "they came with others"
    apart = Memory(*samples(1, 2, 3, 4))
    with Loader(apart, batch_size=2) as loader:
        loader.load_state_dict(saved)
        assert list(loader) == []
    assert [each.num_delivered for each in apart.commits] == [4]


def test_a_state_of_an_earlier_opening_acknowledges_nothing() -> None:
    """Its deliveries are counted from another beginning: what follows is in no checkpoint."""
    first, second = Memory(*samples(1, 2, 3, 4)), Memory(*samples(5, 6, 7, 8))
    with Loader(first, batch_size=4) as loader:
        next(iter(loader))
        saved = loader.state_dict()
    with Loader(second, batch_size=2) as loader:
        loader.load_state_dict(saved)
        next(iter(loader))
        loader.commit(saved)
        assert second.commits == []
        loader.commit(loader.state_dict())
        assert [each.sequences for each in second.commits] == [{"p": 6}]


def test_a_broker_that_waits_for_an_acknowledgement_is_named() -> None:
    source = Memory(*samples(1, 2, 3))
    source.max_unacknowledged = 3
    source.never_ends = True
    with Loader(source, batch_size=2) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(DataError, match="waits for an acknowledgement: 3 messages are not in a checkpoint yet"):
            next(batches)


def test_what_a_stream_cannot_be_is_refused(broker: PrivateBroker, tmp_path: Path) -> None:
    source = Memory(*samples(1, 2))
    with pytest.raises(ConfigError, match="data = 'Memory': is a stream, which 2 data ranks cannot share"):
        Loader(source, batch_size=2, share=(0, 2))
    with pytest.raises(ConfigError, match=r"loader.workers = 1: Memory is read in the training process"):
        Loader(source, batch_size=2, spec=LoaderSpec(workers=1))
    assert load_first_batch(Data(source), 3).tolist() == [1, 1, 1]
    assert source.num_delivered == 0, "an example is not consumed"
    assert fingerprint(source) == fingerprint(Memory())
    publish_retained(broker, "refused/1")
    for words, problem in (
        (["checkpoint.every_steps=null"], r"checkpoint.every_steps = None: is by time, and a broker"),
        (["workers=2", "parallel=tensor"], "workers = 2: cannot share a stream of messages"),
        (["stop.epochs=2"], r"stop.epochs = 2.0: a stream of messages has no epochs"),
        (["batch_size=500"], r"checkpoint.every_steps = 3: needs 3500 messages before .*, and the broker sends 1000"),
    ):
        with pytest.raises(ConfigError, match=problem):
            validate_run(make_spec(broker, "refused", tmp_path, *words))
    with pytest.raises(DataError, match="no message came"):
        load_first_batch(Data(make_source(broker.address, "nothing", timeout_s=0.2)), 1)
    with pytest.raises(ConfigError, match=r"mqtt.client_id = '': is empty. name the session"):
        MqttSource(MqttSpec(broker=broker.address, topic="t"), decode)


def test_a_message_that_the_broker_holds_is_an_example_and_stays(broker: PrivateBroker) -> None:
    source = make_source(broker.address, "held", timeout_s=1.0)
    source.open(StreamState())
    source.close()
    publish(broker, "held", range(7, 8))
    assert load_first_batch(Data(source), 2)[2].tolist() == [7, 7]
    source.open(StreamState())
    assert [each.value[2] for each in source.poll(10, 600).messages] == [7]
    source.close()
