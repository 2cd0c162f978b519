"""`python -m shoal.actor` as a command: what it must be told, what it says when it was not, and how it ends."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rl_setting import EXPERIENCE, TOKEN, Parts, serving
from shoal.actor.__main__ import main
from shoal.actor.connection import GatewayAddresses, format_actor_command, format_actor_options
from shoal.home import read_existing_token
from shoal.rl.experience.queue import BatchRequest
from shoal_program import Program

WORDS = ("--connect", "tcp://127.0.0.1:1", "--env", "CartPole-v1", "--timeout-s", "0.1")
TAKE_ALL = BatchRequest(1, 100_000, 1_000, 0.05)


@pytest.fixture(autouse=True)
def _same_handler() -> Iterator[None]:
    """The signal handler of before."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_an_actor_never_invents_a_token(shoal_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 1
    assert (
        "set SHOAL_TOKEN to the content of $SHOAL_HOME/token on the host where the job runs" in capsys.readouterr().err
    )
    assert not shoal_home.exists()


def test_the_token_is_the_variable_or_else_the_file(shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_existing_token() == ""
    shoal_home.mkdir()
    (shoal_home / "token").write_text("of the file\n")
    assert read_existing_token() == "of the file"
    monkeypatch.setenv("SHOAL_TOKEN", "of the variable")
    assert read_existing_token() == "of the variable"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--connect", "tcp://127.0.0.1:99999"), "connect = 'tcp://127.0.0.1:99999': is not an address"),
        (("--server-key", "nonsense"), "server-key = "),
        ((), "; if it prints a server key, it answers only actors that have it (--server-key)"),
        (("--server-key", "k" * 40), f"; if it is there, its server key is another than {'k' * 40}, or it has none"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    more: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no game is started for an address that is none."""
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    if "connect" in said:
        monkeypatch.setattr("shoal.actor.__main__.open_environment", lambda *_: pytest.fail("a game is started"))
    assert main([*WORDS, *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_an_actor_whose_clock_went_back_begins_with_a_larger_incarnation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    with serving() as parts:
        parts.ledger.open_account(("robot", 2**62))
        words = ["--connect", parts.address, "--env", "sign_game:SignGame", "--actor-id", "robot", "--max-steps", "20"]
        assert main(words) == 1
        assert f"stale_incarnation: incarnation {2**62} has been seen: use a larger one" in capsys.readouterr().err
        refused = [details for _, kind, details in parts.gateway.take_events() if kind == "actor_refused"]
        assert [(each["actor_id"], each["reason"]) for each in refused] == [("robot", "stale_incarnation")]
        assert main([*words, "--incarnation", str(2**62 + 1)]) == 0
        assert parts.ledger.get_account(("robot", 2**62 + 1)).received > 0


def test_an_actor_that_gets_no_answer_says_that_it_goes_on_trying(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    monkeypatch.setattr("shoal.actor.__main__.CONNECT_NOTICE_S", 0.01)
    assert main([*WORDS, "--timeout-s", "0.5"]) == 1
    trying, gave_up = capsys.readouterr().err.splitlines()
    assert trying == "no gateway answers at tcp://127.0.0.1:1 yet: trying for 0.5 s"
    assert gave_up.startswith("error: no gateway answers")


def test_an_actor_without_a_name_of_its_own_does_not_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, "--actor-id", ""])
    assert "argument --actor-id: is empty" in capsys.readouterr().err


def actor(*words: str, stdin: int = subprocess.DEVNULL) -> Program:
    environment = {**os.environ, "SHOAL_TOKEN": TOKEN}
    return Program([sys.executable, "-m", "shoal.actor", *words], environment, stdin=stdin)


def plays(parts: Parts) -> bool:
    return any(each["steps"] for each in parts.gateway.stats()["actors"])


@pytest.mark.parametrize("has_lifeline", [True, False])
def test_an_actor_ends_with_the_program_that_holds_its_lifeline_and_by_a_signal(has_lifeline: bool) -> None:
    """By a signal also where its gateway is gone."""
    with serving() as parts:
        words = ["--connect", parts.address, "--env", "CartPole-v1", "--timeout-s", "600"]
        with actor(*words, *["--lifeline"] * has_lifeline, stdin=subprocess.PIPE) as program:
            program.wait_until(lambda: plays(parts), "its first steps")
            if has_lifeline:
                program.process.stdin.close()  # as the kernel does for a program that is killed
            else:
                parts.gateway.close()
                program.interrupt(signal.SIGTERM)
            assert program.wait() == 0


def test_processes_are_actors_of_their_own_each_with_several_environments() -> None:
    """Each stream of an actor has its own episodes, and all of them end with the command."""
    with serving() as parts:
        words = ["--connect", parts.address, "--env", "CartPole-v1", "--actor-id", "host", "--seed", "1"]
        with actor(*words, "--processes", "2", "--envs", "3") as program:

            def have_both_played() -> bool:
                parts.queue.take("learner", TAKE_ALL)  # otherwise the first actor fills the queue for good
                actors = parts.gateway.stats()["actors"]
                return len(actors) == 2 and all(each["steps"] >= 3 for each in actors)

            program.wait_until(have_both_played, "their episodes")
            program.interrupt(signal.SIGTERM)
            assert program.wait() == 0
        actors = parts.gateway.stats()["actors"]
        assert sorted(each["actor_id"] for each in actors) == ["host-0", "host-1"]
        program.wait_until(lambda: not any(each["connected"] for each in parts.gateway.stats()["actors"]), "the end")


def test_the_status_of_a_process_that_fails_is_that_of_the_command() -> None:
    with actor(*WORDS, "--processes", "2") as program:
        assert program.wait() == 1


def test_an_actor_does_not_play_along_when_a_run_of_another_game_takes_the_address() -> None:
    """It could not be told from the right one by what it observes."""
    with serving() as parts:
        port = parts.gateway.port
        words = ["--connect", parts.address, "--env", "CartPole-v1", "--timeout-s", "600"]
        with actor(*words) as program:
            program.wait_until(lambda: plays(parts), "its first steps")
            parts.gateway.close()
            three = replace(EXPERIENCE, action=replace(EXPERIENCE.action, high=2))
            with serving(port=port, experience=three, run_id="run-2") as other:
                program.wait_for_line(r"acts with Discrete\(2\), and this run with Discrete\(3\)")
                assert program.wait() == 1
                assert other.ledger.get_totals().received == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "-1"),
        ("--max-steps", "0"),
        ("--envs", "0"),
        ("--processes", "0"),
        ("--timeout-s", "-1"),
        ("--seed", "x"),
    ],
)
def test_a_number_that_means_nothing_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, *words])
    assert f"argument {words[0]}: '{words[1]}' is no number from" in capsys.readouterr().err


def test_what_starts_an_actor_can_be_typed_whatever_the_key_is() -> None:
    key = "-E-0l>*!]6?#(O1TIwV3V]vutCf@ei??-7rgip2n"
    command = format_actor_command("tcp://10.0.0.7:5555", "mygame:My-v0", key)
    assert shlex.split(command)[3:] == format_actor_options("tcp://10.0.0.7:5555", "mygame:My-v0", key)
    assert format_actor_options("tcp://10.0.0.7:5555", "mygame:My-v0", "")[-1] == "mygame:My-v0"
    typed = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True, check=True).stdout
    assert f"--server-key={key}" in typed


def test_a_place_that_has_no_address_leaves_the_others(tmp_path: Path) -> None:
    place = tmp_path / "gateway.address"
    addresses = GatewayAddresses(f"tcp://127.0.0.1:5555|{place}", "")
    found = list[str]()
    for text in ("tcp://", "tcp://10.0.0.2:5555\n", "<html>"):
        place.write_text(text)
        found += [addresses.get_next(), addresses.get_next()]
    assert found[::2] == ["tcp://127.0.0.1:5555"] * 3
    assert found[1::2] == ["", "tcp://10.0.0.2:5555", "tcp://10.0.0.2:5555"]
