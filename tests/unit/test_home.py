"""The tokens of $SHOAL_HOME: made once, whole, and never empty."""

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import home
from shoal.errors import ConfigError


@pytest.fixture
def folder(shoal_home: Path) -> Path:
    shoal_home.mkdir()
    return shoal_home


def test_a_token_is_made_once_for_its_owner_alone(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: home.load_access_token(), range(64)))
    assert tokens == {(folder / "token").read_text()}
    assert len(tokens.pop()) == 48
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["token"]


def test_what_interrupts_the_making_of_a_token_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            ConfigError, match=r"token.* can be neither read nor made: No space left on device. set SHOAL_HOME"
        ):
            home.load_access_token()
    assert list(folder.iterdir()) == []
    assert len(home.load_access_token()) == 48


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_token_is_refused(folder: Path, content: str) -> None:
    for name in ("token", "ray-token"):
        (folder / name).write_text(content)
    for ask in (home.load_access_token, home.ray_token_path):
        with pytest.raises(ConfigError, match=r"holds no token. remove the file, and a new one is made"):
            ask()


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_home_that_is_a_file_is_refused_by_name(inside: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("SHOAL_HOME", str(folder / "file" / inside))
    for ask in (home.home, home.load_access_token, home.ray_token_path):
        with pytest.raises(ConfigError, match=r"^SHOAL_HOME = '.*file.*': is no folder: .*set it to one where you may"):
            ask()
    assert home.read_existing_token() == ""


@pytest.mark.parametrize("said", ["tok\n", " tok", "tok\r\n"])
def test_a_new_line_is_no_part_of_a_token(said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", said)
    assert home.load_access_token() == home.read_existing_token() == "tok"
    monkeypatch.setenv("SHOAL_TOKEN", "\n")
    assert home.read_existing_token() == ""
    assert len(home.load_access_token()) == 48


@pytest.mark.parametrize("said", ["two words", "tök", "a\nb"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(
    said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", said)
    with pytest.raises(ConfigError, match="cannot be carried by a header") as caught:
        home.load_access_token()
    assert said not in str(caught.value)


def test_a_token_that_cannot_be_read_is_said_so(folder: Path) -> None:
    (folder / "token").mkdir()
    with pytest.raises(ConfigError, match=r"^token = '.*token': cannot be read: Is a directory. set SHOAL_TOKEN$"):
        home.read_existing_token()


def test_who_has_no_home_has_no_token_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "SHOAL_HOME", "SHOAL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as in a container that runs as some number
    assert home.read_existing_token() == ""
    with pytest.raises(ConfigError, match=r"^SHOAL_HOME = '~/.shoal': is no folder: Could not determine home"):
        home.home()


@pytest.mark.parametrize("is_held", [False, True])
def test_windows_locks_a_file_by_its_own_call(is_held: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        calls.append((mode, num_bytes))
        if is_held:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    refused = pytest.raises(TimeoutError, match="is held by another") if is_held else nullcontext()
    with refused, home.file_lock(folder / "lock", timeout_s=0.05):
        assert not is_held
    assert set(calls) == {(2, 1)}
