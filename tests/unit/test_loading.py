"""What is loaded once is not looked through again."""

import gc
from collections.abc import Iterator

import pytest

from shoal.gc_freeze import freeze_loaded_objects


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_looked_through_while_loading_nor_later() -> None:
    with freeze_loaded_objects():
        assert not gc.isenabled()
        kept = [[number] for number in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)
    assert not any(each is kept for each in gc.get_objects())


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_it_was_also_when_loading_fails(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    with pytest.raises(ImportError), freeze_loaded_objects():
        raise ImportError("no such module")
    assert gc.isenabled() is is_enabled
