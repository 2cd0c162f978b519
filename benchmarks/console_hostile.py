"""Hostile requests at a console of its own process: all must be refused or do nothing, and honest pages be answered.

    python -m benchmarks.console_hostile [--runs N] [--quick]

The requests of tests/hostile_requests.py, byte by byte over TCP, as no browser would send some of them. Then 10,000
streams are asked for at once and held open as far as the console lets them, while an honest page is asked for, again
and again; what it takes is compared with before. Scripts in names, tags and logs, and frames, are tried by a browser
in tests/libs/console/test_console_page.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from collections import Counter
from urllib.parse import urlencode

from benchmarks.children import ROOT, scratch
from benchmarks.console import serve_console
from benchmarks.result import compare, options, write
from shoal import runs
from shoal.libs.console.live import MAX_ANONYMOUS_STREAMS
from shoal.libs.console.notes import change_note, read_notes

sys.path.append(str(ROOT / "tests"))
from hostile_requests import REQUESTS, RUN, TOKEN, HostileRequest

NOTE = "as it was"


async def send_raw(port: int, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """Status and answer, head included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"content-length: {len(body)}", "connection: close"]
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
    answer = b""
    try:
        async with asyncio.timeout(30.0):
            while part := await reader.read(1 << 16):
                answer += part
    except ConnectionError:
        pass  # it has answered before all of the body came
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


async def log_in(port: int) -> str:
    origin = {"host": f"127.0.0.1:{port}", "origin": f"http://127.0.0.1:{port}"}
    _, answer = await send_raw(port, "POST", "/login", origin, urlencode({"token": TOKEN}).encode())
    return answer.split(b"set-cookie: ")[1].split(b";")[0].decode()


async def is_harmless(port: int, session: str, hostile: HostileRequest) -> bool:
    host = f"127.0.0.1:{port}"
    headers = {"host": host, **hostile.headers}
    filled = {name: value.format(host=host, port=port, session=session) for name, value in headers.items()}
    status, answer = await send_raw(port, hostile.method, hostile.target, filled, hostile.body)
    is_secret = TOKEN.encode() in answer or b"root:" in answer or b"import hmac" in answer
    is_harmless = status in hostile.statuses and not is_secret and read_notes()[RUN].note == NOTE
    if not is_harmless:
        print(f"{hostile.name}: {status}", flush=True)
    return is_harmless


def measure_page(address: str) -> float:
    began_at = time.perf_counter()
    for path in ("", "static/app.js", f"api/runs/{RUN}"):
        with urllib.request.urlopen(address + path, timeout=30.0) as answer:
            assert answer.status == 200
            answer.read()
    return time.perf_counter() - began_at


async def flood(port: int, count: int, is_over: asyncio.Event, statuses: Counter[str]) -> None:
    """Ask for streams, all at once, and hold what is given."""
    gate = asyncio.Semaphore(1000)  # connections that are being made

    async def hold() -> None:
        try:
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"GET /api/stream?runs={RUN} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n"
                writer.write(head.encode())
                status = (await reader.readline()).split(b" ")[1].decode()
            statuses[status] += 1
            if status == "200":
                await is_over.wait()
            writer.close()
        except (ConnectionError, IndexError):
            statuses["ended"] += 1

    await asyncio.gather(*(hold() for _ in range(count)))


async def attack(address: str, port: int, count: int) -> tuple[int, list[float], list[float], Counter[str]]:
    session = await log_in(port)
    harmless = [await is_harmless(port, session, each) for each in REQUESTS]
    before = [await asyncio.to_thread(measure_page, address) for _ in range(20)]
    is_over, statuses = asyncio.Event(), Counter[str]()
    flooding = asyncio.create_task(flood(port, count, is_over, statuses))
    during = []
    while sum(statuses.values()) < count:
        during.append(await asyncio.to_thread(measure_page, address))
    during += [await asyncio.to_thread(measure_page, address) for _ in range(20)]  # while streams are held
    is_over.set()
    await flooding
    return sum(harmless), before, during, statuses


def main() -> None:
    chosen = options(__doc__, runs=3)
    count = 1000 if chosen.quick else 10_000
    harmless, held, before, during = [], [], list[float](), list[float]()
    with scratch() as folder:
        os.environ |= {"SHOAL_HOME": str(folder / "home"), "SHOAL_TOKEN": TOKEN}
        with runs.create("lenet", "seed: 1\n", RUN) as recorder:
            recorder.log(1, {"loss": 1.0})
        change_note(RUN, {"note": NOTE})
        for _ in range(chosen.runs):
            with serve_console(folder) as address:
                port = int(address.rstrip("/").rpartition(":")[2])
                number, calm, flooded, statuses = asyncio.run(attack(address, port, count))
                print(json.dumps({"harmless": number, "of": len(REQUESTS), **statuses}), flush=True)
                harmless.append(float(number))
                held.append(float(statuses["200"]))
                before.append(statistics.median(calm))
                during.append(statistics.median(flooded))
    requests, streams = f"of {len(REQUESTS)} hostile requests, refused or inert", f"{count:,} streams at once"
    rows = [
        compare(requests, "requests", "higher", harmless, bar=float(len(REQUESTS)), bar_kind="value"),
        compare(f"{streams}: held open", "", "lower", held, bar=float(MAX_ANONYMOUS_STREAMS), bar_kind="value"),
        compare(f"{streams}: an honest page meanwhile", "s", "lower", during, before, "before"),
    ]
    write("console_hostile", rows, chosen.results)


if __name__ == "__main__":
    main()
