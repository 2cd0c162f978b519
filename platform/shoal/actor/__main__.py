"""`python -m shoal.actor`: external actors, as a game client would run them. Needs gymnasium for the environment."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from shoal.actor.client import ActorClient
from shoal.actor.environment import load_film_maker, open_environment, require_matching_spaces
from shoal.actor.environment_loop import play
from shoal.actor.remote import RemoteClient, run_remote_actor
from shoal.errors import ConfigError, ShoalError
from shoal.home import read_existing_token

CONNECT_NOTICE_S = 2.0  # after which an actor without an answer reports that it is still trying
Number = TypeVar("Number", int, float)
_EXAMPLES = """examples:
  python -m shoal.actor --connect tcp://127.0.0.1:5555 --env CartPole-v1
  SHOAL_TOKEN=... python -m shoal.actor --connect tcp://10.0.0.7:5555 --server-key=KEY --env CartPole-v1
  python -m shoal.actor --connect tcp://127.0.0.1:5555 --env CartPole-v1 --processes 4 --envs 8

The token is $SHOAL_TOKEN, or the file `token` in $SHOAL_HOME (default ~/.shoal). On another machine than the job's, set
SHOAL_TOKEN to what that file holds there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play until the run is over or a signal comes; returns the exit status."""
    options = make_parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.lifeline:
        threading.Thread(target=_exit_on_stdin_close, name="lifeline", daemon=True).start()
    try:
        return _run_processes(options, words) if options.processes > 1 else _run(options)
    except KeyboardInterrupt:
        return 130
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "shoal actor", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS",
        help="the gateway: tcp://host:port; with | between, all that it may have, of which one may be a file, or an"
        " object's URL, that has the address; of a run of several policies, all of their gateways, with commas between",
    )
    parser.add_argument(
        "--env",
        required=True,
        help="a gymnasium id; module:Id imports module first; module:function or file.py:function calls it",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a part of a Dict that the run leaves out (repeat it)",
    )
    parser.add_argument("--actor-id", type=_parse_nonempty, help="unique in the run; default: host name and process id")
    parser.add_argument(
        "--envs", type=_make_minimum_parser(1, int), default=1, help="environments, which act as one batch (default 1)"
    )
    parser.add_argument(
        "--processes",
        type=_make_minimum_parser(1, int),
        default=1,
        help="actors, each a process of its own, which adds -0, -1, ... to the id (default 1)",
    )
    _add_run_options(parser)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """What most actors need not say."""
    parser.add_argument(
        "--server-key",
        default="",
        metavar="KEY",
        help="the gateway's CURVE public key, if the job prints one: --server-key=KEY, for it may begin with a dash",
    )
    parser.add_argument(
        "--inference",
        choices=("local", "remote"),
        default="local",
        help="where the policy runs: here, with the weights, or at the gateway, which gets each observation",
    )
    parser.add_argument(
        "--incarnation",
        type=_make_minimum_parser(0, int),
        default=None,
        help="larger than in the actor's earlier starts; default: the time in nanoseconds, which fails where the clock"
        " has gone back: give one above that in the error stale_incarnation",
    )
    parser.add_argument(
        "--seed", type=_make_minimum_parser(0, int), default=None, help="of the environment and of the actions"
    )
    parser.add_argument(
        "--max-steps", type=_make_minimum_parser(1, int), default=None, help="stop after so many environment steps"
    )
    parser.add_argument(
        "--timeout-s",
        type=_make_minimum_parser(0.1, float),
        default=60.0,
        help="give up when no gateway answers for so long; five times as long once it has answered",
    )
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="write films of episodes: into FOLDER, or into the run's folder where it is on this host; they stay here",
    )
    parser.add_argument(
        "--record-every",
        type=_make_minimum_parser(0, int),
        default=50,
        metavar="EPISODES",
        help="film one of so many episodes (default 50); it takes a tenth of the time at most",
    )
    parser.add_argument(
        "--lifeline", action="store_true", help="end when standard input closes: for a program that starts actors"
    )


def _make_minimum_parser(least: Number, kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A parser for argparse, which names the option in errors."""

    def parse(text: str) -> Number:
        with suppress(ValueError):
            if (value := kind(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} on")

    return parse


def _parse_nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def _exit_on_stdin_close() -> None:
    while os.read(0, 1024):  # not sys.stdin: this thread would hold its lock while Python shuts down
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _run(options: argparse.Namespace) -> int:
    token = read_existing_token()
    if not token:
        remedy = "set SHOAL_TOKEN to the content of $SHOAL_HOME/token on the host where the job runs"
        raise ConfigError("token", token, "neither $SHOAL_TOKEN nor the file $SHOAL_HOME/token has one", remedy)
    if options.inference == "remote" and options.envs > 1:
        problem = "is for an actor that runs the policy itself"
        raise ConfigError("envs", options.envs, problem, "with --inference remote start several: --processes")
    addresses = options.connect.split(",")
    clients = [
        (RemoteClient if options.inference == "remote" else ActorClient)(
            each,
            token,
            options.actor_id or "",
            incarnation=options.incarnation,
            server_key=options.server_key,
            timeout_s=options.timeout_s,
        )
        for each in addresses
    ]
    trying = f"no gateway answers at {options.connect} yet: trying for {options.timeout_s:g} s"
    silence = threading.Timer(CONNECT_NOTICE_S, lambda: print(trying, file=sys.stderr))
    silence.daemon = True
    with ExitStack() as opened:
        # Last: one may start a game, and is closed from here on.
        records = options.record is not None and options.record_every > 0
        environments = [
            opened.enter_context(open_environment(options.env, options.ignore, draws=records and index == 0))
            for index in range(options.envs)
        ]
        if records:
            film = load_film_maker()
            environments[0] = film(environments[0], clients, options.record, options.record_every)
        opened.callback(silence.cancel)
        silence.start()
        for client in clients:
            opened.enter_context(client)
        silence.cancel()
        on_run = partial(require_matching_spaces, environments[0], options.env)
        if remote := [client for client in clients if isinstance(client, RemoteClient)]:
            run_remote_actor(environments[0], remote, options.seed, options.max_steps, on_run)
        else:
            play(environments, clients, options.seed, options.max_steps, on_run=on_run)
    return 0


def _run_processes(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start each actor as a process of its own; returns the exit status of the first that failed, or 0."""
    prefix = options.actor_id or f"{socket.gethostname()[:40]}-{os.getpid()}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    actors: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(options.processes):
            own = ["--processes", "1", "--lifeline", "--actor-id", f"{prefix}-{index}"]
            own += ["--record-every", "0"] if index else []
            own += ["--seed", str(options.seed + index)] if options.seed is not None else []
            # A later option overrides an earlier one. An actor ends when its standard input does.
            command = [sys.executable, "-m", "shoal.actor", *arguments, *own]
            actors.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
        return next((status for status in [actor.wait() for actor in actors] if status), 0)
    finally:
        for actor in actors:
            if actor.stdin is not None:
                actor.stdin.close()
        for actor in actors:
            actor.wait()


if __name__ == "__main__":
    sys.exit(main())
