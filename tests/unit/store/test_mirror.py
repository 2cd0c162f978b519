"""A mirror brings what is new, again after an error, and the rest at its end."""

import logging
import threading
from collections.abc import Callable

import pytest

from shoal.errors import StoreError
from shoal.store import Mirror
from waiting import wait_for


class Bringing:
    """What `bring` does: fails while `error` is set, and waits while `may_end` is not."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_calls = self.num_done = 0

    def __call__(self) -> None:
        self.num_calls += 1
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        self.num_done += 1


@pytest.fixture
def bring() -> Bringing:
    return Bringing()


def test_it_is_called_when_it_was_woken_or_the_time_has_come(bring: Bringing) -> None:
    woken, regular = Mirror("woken", bring), Mirror("regular", (often := Bringing()), interval_s=0.001)
    wait_for(lambda: often.num_done > 3)
    assert bring.num_calls == 0
    woken.wake()
    wait_for(lambda: bring.num_done == 1)
    assert woken.close(10)
    assert regular.close(10)
    assert bring.num_done == 2
    assert not woken.is_alive
    woken.wake()
    assert woken.close(10)
    assert bring.num_done == 2


def test_after_an_error_it_is_called_again_and_the_problem_is_logged_once(
    bring: Bringing, caplog: pytest.LogCaptureFixture
) -> None:
    bring.error = StoreError("the store is away")
    mirror = Mirror("away", bring, retry_s=0.001, warning="nothing is brought")
    with caplog.at_level(logging.WARNING):
        assert not mirror.flush(0.1)
        assert mirror.problem == "the store is away"
        wait_for(lambda: bring.num_calls > 3)
        bring.error = None
        wait_for(lambda: not mirror.problem)
    assert bring.num_done == 1
    assert caplog.messages == ["nothing is brought: the store is away"]
    assert mirror.close(10)


def test_what_is_new_during_a_call_is_brought_by_the_next_one_and_nobody_waits_longer_than_he_says(
    bring: Bringing,
) -> None:
    mirror = Mirror("busy", bring)
    bring.may_end.clear()
    mirror.wake()
    wait_for(lambda: bring.num_calls == 1)
    assert not mirror.flush(0.01)
    assert not mirror.close(0.01)
    bring.may_end.set()
    assert mirror.close(10)
    assert bring.num_done == 2


@pytest.mark.parametrize("is_patient", [False, True])
def test_the_rest_is_tried_once_or_until_the_time_is_over(bring: Bringing, is_patient: bool) -> None:
    mirror, bring.error = Mirror("closed", bring, retry_s=0.001), StoreError("the store is away")
    assert mirror.close(0.1, is_patient=is_patient) or mirror.close(10)
    assert (bring.num_calls > 2) == is_patient
    assert mirror.problem == "the store is away"


def end_for_another() -> bool:
    return False


def fail_by_a_bug() -> bool:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(("bring", "problem"), [(end_for_another, ""), (fail_by_a_bug, "a bug")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_is_never_called_again_where_the_store_is_anothers_or_by_a_bug(
    bring: Callable[[], bool], problem: str
) -> None:
    mirror = Mirror("over", bring, interval_s=0.001)
    wait_for(lambda: not mirror.is_alive)
    assert mirror.problem == problem
