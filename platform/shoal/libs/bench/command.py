"""`shoal bench`: parse, put the load, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import click

from shoal.client import Client, InferenceError
from shoal.client.discovery import find_endpoint, token_for
from shoal.errors import ConfigError
from shoal.extend.cli import (
    DefaultCommandGroup,
    FiniteRange,
    Key,
    Positive,
    Seconds,
    Texts,
    ca_option,
    make_number_column,
    make_table,
)
from shoal.home import read_existing_token
from shoal.libs.bench.endpoint import build_requests, build_text_requests, put_load
from shoal.libs.bench.gateway import SimulatedActors
from shoal.libs.predict.command import read_fields, read_texts
from shoal.runs import load

MAX_CONNECTIONS = 1000  # of an open loop
PROMPTS = ("What is a shoal?", "Write a story about a whale.", "Why is the sea salt?", "List ten fish.")
MAX_TOKENS = 64
Rate = Annotated[float, FiniteRange(min=0)]
WarmUp = Annotated[Rate, "Seconds before, which are not counted."]


class BenchGroup(DefaultCommandGroup):
    """A verb follows, or an endpoint."""

    default = "endpoint"


@click.group(cls=BenchGroup)
def bench() -> None:
    """Put a load on an endpoint or a gateway, and measure it.

    `shoal bench ENDPOINT` is `shoal bench endpoint ENDPOINT`, whose --help lists the options.

    \b
    Examples:
      shoal bench fashion --rate 500 --seconds 30
      shoal bench gateway latest --actors 200
    """


def _show(shown: Mapping[str, Any]) -> Iterator[object]:
    yield shown["title"]
    names = [name for name in shown["times"][0] if name.endswith("_s")]
    rows = (
        (
            each["of"],
            f"{each['count']:,}",
            *("-" if each[name] is None else f"{1e3 * each[name]:,.2f}" for name in names),
        )
        for each in shown["times"]
    )
    headings = ("count", *(name.replace("_s", " ms") for name in names))
    yield make_table("", *map(make_number_column, headings), rows=rows)
    for kind, num in shown.get("errors", {}).items():
        yield f"{num:,} times {kind} {shown['examples'].get(kind, '')}"
    for warning in shown["warnings"]:
        yield click.style(f"warning: {warning}", fg="yellow")


@bench.verb("endpoint", show=_show, work="sending")
@ca_option
def bench_endpoint(
    endpoint: Annotated[str | None, "[NAME|URL]"] = None,
    *,
    model: Annotated[str, "The model.  [default: the only one]"] = "",
    rate: Annotated[Rate, "Requests/s on average, in an open loop; 0: callers that wait."] = 0.0,
    callers: Annotated[Positive, "Each sends its next request when it has its answer."] = 8,
    seconds: Seconds = 10.0,
    warm_up: WarmUp = 1.0,
    timeout: Annotated[Seconds, "From when a request was due, seconds."] = 30.0,
    rows: Annotated[Path | None, "--rows FILE", ".csv, .parquet, .npz, .npy or .jsonl.  [default: drawn]"] = None,
    rows_per_request: Positive = 1,
    texts: Annotated[Texts, "--text TEXT|@FILE", "For a language model; @FILE: on each line."] = (),
    fields: Annotated[Texts, "--with NAME=VALUE", "Of texts: max_tokens=64, temperature=0."] = (),
    key: Key = "",
) -> dict[str, Any]:
    """Put a load on an endpoint: latencies by version, errors, and the rate that was reached.

    With --rate latency counts from the moment when a request was due, so that a stall counts for all requests that it
    delayed.

    \b
    Examples:
      shoal bench fashion --rate 500 --seconds 30
      shoal bench fashion --callers 32 --rows images.npz --rows-per-request 4
      shoal bench https://models.example --model smollm --rate 2 --text @questions.jsonl --with max_tokens=100
    """
    if rate and round(rate * seconds) < 1:
        raise ConfigError("rate", rate, f"gives no request in {seconds:g} s", "give more of either")
    if texts and not read_texts(texts):
        raise ConfigError("text", ", ".join(texts), "has no text")
    target = find_endpoint(endpoint, model)
    with target.connect(key) as client:
        name = model or _find_model(client)
        try:
            more = {"max_tokens": MAX_TOKENS, **read_fields(fields)}
            requests = list(build_text_requests(client, name, read_texts(texts or PROMPTS), more))
        except InferenceError as error:
            if error.status != 404 or texts:
                raise
            requests = list(build_requests(client, name, rows, rows_per_request))
    connections = MAX_CONNECTIONS if rate else callers
    plan = {"seconds": seconds, "connections": connections, "rate": rate, "warm_up_s": warm_up, "timeout_s": timeout}
    found = put_load(target.url, key or token_for(target.url), requests, **plan)
    asked = f"of {rate:,g} asked for" if rate else f"of {callers} callers"
    title = f"{name} at {target.url}: {found['reached_per_s']:,.1f} answers/s {asked}"
    if tokens_per_s := found["tokens_per_s"]:
        title += f", {tokens_per_s:,.1f} tokens/s"
    return {"title": title, **found}


def _find_model(client: Client) -> str:
    names = {each.name for each in client.models()}
    if len(names) != 1:
        raise ConfigError("model", "", f"is not given, and there is {', '.join(sorted(names))}", "give --model NAME")
    return names.pop()


@bench.verb("gateway", show=_show, work="playing")
def bench_gateway(
    gateway: Annotated[str, "ADDRESS|RUN"],
    *,
    actors: Positive = 100,
    steps_per_s: Annotated[Rate, "Of each actor; 0: as the gateway allows."] = 0.0,
    seconds: Seconds = 10.0,
    warm_up: WarmUp = 1.0,
    server_key: Annotated[str, "The gateway's public key, if the run prints one."] = "",
) -> dict[str, Any]:
    """Let simulated actors play against a gateway: random actions, and observations of the right shape.

    Its learner learns from them: take a run that may be thrown away. The token is $SHOAL_TOKEN, or this machine's.

    \b
    Examples:
      shoal bench gateway latest --actors 200
      shoal bench gateway tcp://10.0.0.7:5555 --actors 1000 --steps-per-s 20 --seconds 60
    """
    address = gateway
    if "://" not in gateway:
        addresses = [each.address for each in load(gateway).endpoints() if each.kind == "gateway"]
        if len(addresses) != 1:
            raise ConfigError("gateway", gateway, f"has {len(addresses)} gateways", "give the address of one")
        (address,) = addresses
    with closing(SimulatedActors(address, read_existing_token(), actors, steps_per_s, server_key)) as simulated:
        simulated.connect()
        if warm_up:
            simulated.run(warm_up)
        found = simulated.run(seconds)
    segments = ", ".join(f"{num:,} {reason}" for reason, num in found["segments"].items())
    title = (
        f"{actors:,} actors at {address}: {found['steps_per_s']:,.0f} steps/s; segments: {segments};"
        f" {len(found['versions'])} versions of the weights; {found['wait_share']:.0%} of the time without credit;"
        f" slowest tenth {found['slowest_tenth']:.2f} of the median"
    )
    return {"title": title, **found}
