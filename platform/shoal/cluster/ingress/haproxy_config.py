"""Rewrites Ray Serve's HAProxy configuration for use by clients, each time HAProxy starts.

The wrapper of `serve_environment` runs it in an interpreter without packages: it imports the standard library only.
Serve has no settings for these changes:

- HAProxy's statistics and metrics listen nowhere (Serve reads them through a unix socket, private to its user).
- A client has `REQUEST_TIMEOUT_S` for the head of a request and the first `tune.bufsize` of its body. HAProxy then
  passes the request on (and can retry it on another replica if it is complete). A gRPC call is passed on at once.
- Errors of HAProxy or Serve have the protocol's body: `{"error": ...}`, or a status in gRPC's trailers. A missing
  application is 503: it is starting or stopping. So is one without a replica (`backup_listener`). The exception is a
  head that HAProxy cannot read, or that is late: 2.8 answers it with HTML of its own, which no setting changes (its
  issue 3032).
- Connections to replicas are kept alive, however many clients there are.
- A replica that answers health checks slowly under load stays.
- A change of the endpoint is sent to one replica only, without retries (it may have applied the change before it died),
  and has its own timeout.
- Heads with many headers are passed on if they fit into a buffer: the endpoint answers 431 when they are too large.
  HAProxy 2.8 answers 400 to one that does not fit, as to any that it cannot read (3.1 knows 414 and 431).
- A call of gRPC names its application in the metadata `application`; without it, it is for the one that has the root.
- Serve's own paths (`/-/healthz`, `/-/routes`, each service of gRPC but the protocol's) and its control headers are
  closed to clients. Serve does not watch for disconnected clients: the endpoint does.
- Normal requests are not logged: Serve would send one datagram each to an unused port.
- The fronts listen as the file `front.json` (`front.Front`) says: addresses, certificate, threads. A request's headers
  about other addresses are removed, unless it comes from a proxy that is named there.

Each change is a rule with a name (`RULES`), and each rule asserts that it found its target: if a newer Ray writes
another configuration, HAProxy does not start, and the error names the rule.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from shoal.cluster.ingress import backup_listener, every_node, shared_listener
from shoal.cluster.ingress.time_limits import CHANGE_S, STREAM_SILENCE_S

REQUEST_TIMEOUT_S = 10
# Health checks queue behind requests in a replica. A replica that takes over the load of a dead one needs a second or
# more. If it counted as dead too, all load would go to Serve's own proxy, which is far slower and needs it as well.
CHECK_TIMEOUT_S = 10
MAX_HEADERS = 4096  # no more fit into a buffer
# Keep connections to replicas as long as HAProxy has any descriptors, which suffice for one per client connection. The
# default of 25% is reached by a third of the allowed clients when all send at once: from then on each request opens a
# connection of its own, and a briefly overloaded endpoint stays overloaded.
# A client that was admitted once is checked again each time: a resumed session would outlive its authority.
DESCRIPTORS = """\
    tune.ssl.cachesize 0
    tune.pool-low-fd-ratio 100
    tune.pool-high-fd-ratio 100
"""
CLOSED_SECTIONS = ("listen stats", "frontend prometheus")
FRONT_FILE = "front.json"  # next to the folder of errors; without it the fronts stay where Serve puts them, on loopback

RULES: dict[str, str] = {
    "sections": "there are a global section, defaults, a front for HTTP and its default back end",
    "close the statistics and the metrics": "their sections are removed",
    "nothing else listens": "a section that listens is one of the two fronts",
    "close the admin socket": "its mode 666 becomes 600",
    "where the fronts listen": "each has one line that binds it, to HOST:PORT, for gRPC with proto h2",
    "number of threads": "the global section has one line nbthread",
    "replace Serve's error files": "those of 502, 503 and 504 give way to ours",
    "names of back ends": "each has a name that says whose it is: http-APPLICATION, grpc-APPLICATION, or Serve's own",
    "back ends that a front selects": "each line that selects one names one of them",
    "leave Serve's proxy out": "a server is a replica, or ends with the word backup",
    "gRPC by way of HTTP/1.1": "the front for gRPC selects the back end of each application",
    "no application for gRPC": "the back end that answers then is there where the front selects it",
}

# HAProxy's code -> the message.
# 502: the replica died before it answered; inference may be retried, so the client gets "try again" as for 503.
UNAVAILABLE = "no replica could answer; try again later"
ERRORS = {
    400: "not a whole request of HTTP",
    401: "a known key is required",
    403: "this is not allowed",
    404: "there is nothing at this path",
    405: "this method is not allowed here",
    408: f"the request was not there after {REQUEST_TIMEOUT_S} s",
    413: "the request is too large",
    422: "the request cannot be processed",
    425: "try again later",
    429: "too many requests; try again later",
    500: "the endpoint failed on this request",
    501: "this is not implemented",
    502: UNAVAILABLE,
    503: UNAVAILABLE,
    504: "no answer in time",
}
RETRIED = 425, 429, 502, 503  # they have Retry-After
PHRASES = {413: "Content Too Large", 422: "Unprocessable Content"}  # as RFC 9110 has them, and Python from 3.13 on
# To a status of gRPC; else 2, unknown.
GRPC_ERRORS = {400: 13, 408: 4, 413: 8, 429: 8, 500: 13, 501: 12, 502: 14, 503: 14, 504: 4}

# For the audit log: the client's address, which `front.json` may take from the headers of a trusted proxy.
FROM = "    http-request set-header shoal-from %[src]"
FORWARDED = "    http-request del-header x-forwarded- -m beg", "    http-request del-header forwarded"
SERVICE = "/inference.GRPCInferenceService/"
PATHS_OF_CHANGES = f"^(/[^/]+)?(/shoal/v1/rollout|/v2/repository/models/|{SERVICE}RepositoryModel)"
# A rollback that is applied twice goes back two versions: retry on another replica only if nothing was sent.
# An endpoint that does not have the root has its name before its paths. Few inferences pass the cheap first condition.
IS_CHANGE = f"{{ path_sub % rollout repository RepositoryModel }} {{ path,url_dec -m reg {PATHS_OF_CHANGES} }}"
ONCE = f"    http-request disable-l7-retry if {IS_CHANGE}"
PATIENT = f"    http-request set-timeout server {CHANGE_S:g}s if {IS_CHANGE}"
STEERING = """\
    http-request del-header x-request-timeout-seconds
    http-request del-header x-session-id
    http-request del-header x-shoal-asleep
    http-request del-header serve_multiplexed_model_id
    http-request del-header serve-multiplexed-model-id
    http-request del-header x-serve-router- -m beg
    http-request del-header x-request-id unless { req.hdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$ }
    http-request set-header x-request-disconnect-disabled ?1
"""
FRONTEND = """\
    option http-buffer-request
    http-request del-header upgrade
    http-request return status 404 errorfiles shoal if { path,url_dec -m beg -i /-/ }
    http-response set-header connection close if { status 408 413 }
    http-response allow if { status lt 400 } or { res.hdr(content-type) -m beg application/json }
"""
# HAProxy applies rules in order, so Serve's own, which follow, never see the requests that these have answered.
GRPC_FRONTEND = f"""\
    timeout client {STREAM_SILENCE_S:g}s
    option http-no-delay
    errorfiles shoal-grpc
    http-request deny deny_status 501 unless {{ path -m beg {SERVICE} }} !{{ path_sub % }}
    http-request del-header expect
"""
# A call needs no HTTP/2 behind HAProxy, and costs the replica a fraction as a request of HTTP/1.1
# (`shoal.protocols`). Answers other than gRPC's come from Serve, whose own route, to a gRPC server in each
# replica, remains for health checks.
HTTP1 = """\
    errorfiles shoal-grpc
    http-response return status 503 errorfiles shoal-grpc if !{ res.hdr(content-type) -m beg application/grpc }
"""
# Each message of a stream is passed on at once. A replica that dies ends its streams without retries: how much it had
# computed is unknown.
STREAM = f"""\
    option http-no-delay
    http-request set-timeout server {STREAM_SILENCE_S:g}s
    http-request disable-l7-retry
"""
# Backend -> (condition for its calls, its lines); the first match is taken.
WAYS = {
    "stream": (f"path {SERVICE}ModelStreamInfer", HTTP1 + STREAM),
    "unary": (f"path -m beg {SERVICE}", HTTP1 + PATIENT + "\n"),
}
FRONTS = ("frontend http_frontend", "frontend grpc_frontend")
REQUIRED_SECTIONS = ("global", "defaults", FRONTS[0], "backend default_backend")
SERVES_BACKENDS = ("default_backend", "default_grpc_backend", "grpc_fallback_backend")
_TO_GRPC = re.compile(r" *(?:use|default)_backend grpc-(\S+)( if .*)?")
_HAS_ROOT = re.compile(r" *acl is_http-(\S+) path_beg /")
_BIND = re.compile(r" *bind (\S+):(\d+)( proto h2)?")
_SELECTS = re.compile(r" *(?:use_backend (\S+) if .*|default_backend (\S+))")
_SERVER = re.compile(r" *server \S+ \S+:\d+ check( observe [^#]*on-error mark-down| backup)?")


Sections = dict[str, list[str]]  # by the first line of each, its other lines
T = TypeVar("T")


class TemplateMismatch(Exception):
    """Serve's configuration is not the one that a rule of this module expects."""

    def __init__(self, rule: str, problem: str) -> None:
        remedy = f"use the version of Ray that shoal asks for, or adapt this rule in {Path(__file__).name}"
        super().__init__(
            f"Serve's HAProxy configuration does not fit the rule {rule!r} ({RULES[rule]}): {problem}; {remedy}"
        )
        self.rule = rule


def _require(found: T | None, rule: str, problem: str) -> T:
    if not found:
        raise TemplateMismatch(rule, problem)
    return found


def rewrite(config: str, errors: str, front: Mapping[str, Any] | None = None) -> str:
    """HAProxy's configuration, rewritten from Serve's `config`; `errors` is the folder of `write_errors`.

    front: the content of `FRONT_FILE`, if there is one

    Raises TemplateMismatch.
    """
    sections = _sections(config)
    for closed in CLOSED_SECTIONS:
        is_there = sections.pop(closed, None) is not None
        _require(is_there, "close the statistics and the metrics", f"there is no section {closed!r}")
    _check(sections)
    errorfiles = ["http-errors shoal", *_error_files(errors, "http")]
    errorfiles += ["http-errors shoal-grpc", *_error_files(errors, "grpc")]
    admin = backup_listener.find_socket_folder(sections)
    folder = _require(admin, "close the admin socket", "there is no admin socket")
    if FRONTS[1] in sections:
        _select_root(sections, sections[FRONTS[1]])
    sections |= _http1_backends(sections, errors)
    backup_listener.add_undisturbing(sections, errors, folder, FRONTS[0], IS_CHANGE)
    for head, lines in sections.items():
        if (application := head.removeprefix("backend http-")) != head:
            sections[head] = backup_listener.add_backup(application, lines, folder, errors)
    sections |= backup_listener.build_sections(sections[FRONTS[0]], folder, ONCE)
    written: list[str] = []
    for head, lines in sections.items():
        lines = _set_front(head, lines, front or {}, folder)
        written += [head, *_section(head, lines, errors), *(errorfiles if head == "global" else ())]
        if head == FRONTS[0]:
            written[len(written) :] = _return_front(written, folder)
    return "\n".join(written) + "\n"


def write_errors(folder: Path) -> None:
    """Write HAProxy's own answers, a file for each code and protocol."""
    folder.mkdir(mode=0o700, exist_ok=True)
    body = json.dumps({"error": UNAVAILABLE})
    (folder / "unavailable.lua").write_text(backup_listener.SERVICE.replace("{body}", body))
    late = build_error(503).replace(body.encode(), backup_listener.LATE.encode())
    late = re.sub(rb"content-length: \d+", b"shoal-late: 1\r\ncontent-length: %d" % len(backup_listener.LATE), late)
    (folder / "late.http").write_bytes(late)
    for code, message in ERRORS.items():
        (folder / f"{code}.http").write_bytes(build_error(code))
        trailers = ["content-type: application/grpc", f"grpc-status: {GRPC_ERRORS.get(code, 2)}"]
        trailers += [f"grpc-message: {message}", "content-length: 0"]
        (folder / f"{code}.grpc").write_text("\r\n".join(["HTTP/1.1 200 OK", *trailers, "", ""]))


def build_error(code: int, closes: bool = False) -> bytes:
    """HAProxy's own answer for one of `ERRORS`. closes: the connection ends with it"""
    body, status = json.dumps({"error": ERRORS[code]}), 503 if code == 502 else code
    lines = [f"HTTP/1.1 {status} {PHRASES.get(status, HTTPStatus(status).phrase)}"]
    lines += ["content-type: application/json", f"content-length: {len(body)}"]
    lines += ["retry-after: 1"] if code in RETRIED else []
    lines += ["connection: close"] if closes or code in (400, 408, 413) else []
    return "\r\n".join([*lines, "", body]).encode()


def _sections(config: str) -> Sections:
    """The sections: each begins at an unindented line. Comments are left out."""
    sections: Sections = {}
    lines: list[str] = []
    for line in config.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            lines = sections.setdefault(line.strip(), [])
        else:
            lines.append(line)
    return sections


def _check(sections: Sections) -> None:
    """Check the rules about the whole configuration."""
    for wanted in REQUIRED_SECTIONS:
        _require(wanted in sections, "sections", f"there is no section {wanted!r}")
    for head, lines in sections.items():
        listens = head.startswith(("frontend ", "listen ")) or any(_is(line, "bind") for line in lines)
        _require(not listens or head in FRONTS, "nothing else listens", f"{head!r} is not known")
    names = [head.removeprefix("backend ") for head in sections if head.startswith("backend ")]
    for name in names:
        is_known = name in SERVES_BACKENDS or name.startswith(("http-", "grpc-"))
        _require(is_known, "names of back ends", f"{name!r} is not known")
    for front in FRONTS:
        selected = _selected(sections.get(front, []))
        for name in selected:
            rule = "no application for gRPC" if name == "default_grpc_backend" else "back ends that a front selects"
            _require(name in names, rule, f"there is no back end {name!r}")
        wanted_names = [name for name in names if front == FRONTS[1] and name.startswith("grpc-")]
        for name in wanted_names:
            _require(name in selected, "gRPC by way of HTTP/1.1", f"nothing selects {name!r}")


def _selected(lines: list[str]) -> list[str]:
    """The back ends that a front selects."""
    result = []
    for line in lines:
        if line.split()[0].endswith("_backend"):
            problem = f"{line.strip()!r} is not known"
            match = _require(_SELECTS.fullmatch(line), "back ends that a front selects", problem)
            result.append(match[1] or match[2])
    return result


def _is(line: str, directive: str) -> bool:
    return line.split()[0] == directive


def _error_files(folder: str, suffix: str) -> list[str]:
    return [f"    errorfile {code} {folder}/{code}.{suffix}" for code in ERRORS]


def _section(head: str, lines: list[str], errors: str) -> list[str]:
    if head == "global":
        own = [
            f"    tune.http.maxhdr {MAX_HEADERS}",
            f"    lua-load {errors}/unavailable.lua",
            *DESCRIPTORS.splitlines(),
        ]
        _require(
            any(_is(line, "stats") and " mode 666 " in line for line in lines),
            "close the admin socket",
            "there is no socket of mode 666",
        )
        return [*(line.replace(" mode 666 ", " mode 600 ") for line in lines), *own]
    if head == "defaults":
        return _defaults(lines)
    if head == "frontend http_frontend":
        own = [f"    maxconn {backup_listener.MAX_HTTP}", *every_node.refuse_health(lines), ONCE]
        own += [*STEERING.splitlines(), *FRONTEND.splitlines(), *_answers()]
        return [*own, *backup_listener.select_second_pass(lines, IS_CHANGE)]
    if head == "frontend grpc_frontend":
        own = [f"    maxconn {backup_listener.MAX_GRPC}", ONCE, *STEERING.splitlines(), *GRPC_FRONTEND.splitlines()]
        return [*own, *_http1_first(lines)]
    if head == "backend default_backend":
        return ["    http-request deny deny_status 503"]
    if head == "backend default_grpc_backend":
        return ["    errorfiles shoal-grpc", "    http-request deny deny_status 503"]
    if head.startswith(("backend http-", "backend quiet-")):
        return [PATIENT, *lines]
    return lines


def _set_front(head: str, lines: list[str], front: Mapping[str, Any], folder: str) -> list[str]:
    """The lines of a front with its addresses, and with its rules first; of the global section with its threads; of a
    back end with the node's address."""
    if head == "global":
        count = sum(_is(line, "nbthread") for line in lines)
        _require(count == 1, "number of threads", f"there are {count}")
        own = f"    nbthread {front['num_threads']}" if front else ""
        return [own or line if _is(line, "nbthread") else line for line in lines]
    if head not in FRONTS:
        return every_node.use_node_address(lines, front.get("address", ""))
    binds = [line for line in lines if _is(line, "bind")]
    match = _BIND.fullmatch(binds[0]) if len(binds) == 1 else None
    address, port, protocol = _require(match, "where the fronts listen", f"{head!r} has {binds}").groups()
    closed = f"unix@{folder}/{'g' if protocol else 'h'}.sock mode 600"
    hosts = ",".join(every_node.list_addresses(front, address, port, closed))
    options = front.get("options", {}).get("grpc" if protocol else "http", "")
    unless = " unless via-1" if front.get("trusts") else ""
    rules = [FROM, *(f"    {rule}" for rule in front.get("rules", [])), *(f"{rule}{unless}" for rule in FORWARDED)]
    if not protocol:
        moves = f"{{ str(on) -m str -f {folder}/{shared_listener.PAUSED_FILE} }}"
        rules.append(f"    http-after-response set-header connection close if {moves}")
    rest = [line for line in lines if not _is(line, "bind")]
    return [f"    bind {hosts}{protocol or ''}{options}", *rules, *rest]


def _return_front(written: list[str], folder: str) -> list[str]:
    """A front with the rules of that for HTTP, which ends `written`: for connections that a replica has accepted from
    its socket and cannot answer any more (`shared_listener`)."""
    rules = [line for line in written[written.index(FRONTS[0]) + 1 :] if line.split()[0] not in ("bind", "maxconn")]
    bind = f"    bind unix@{folder}/{shared_listener.RETURN_SOCKET} accept-proxy mode 600"
    maxconn = f"    maxconn {backup_listener.MAX_RETURNED}"
    return ["frontend shoal_returned", bind, maxconn, "    option httpclose", *rules]


def _http1_backends(sections: Sections, errors: str) -> Sections:
    """A second backend for each application: its replicas' HTTP servers, without Serve's own proxy."""
    applications = [head.removeprefix("backend grpc-") for head in sections if head.startswith("backend grpc-")]
    result: Sections = {}
    for head, lines in sections.items():
        application = head.removeprefix("backend http-")
        if application != head and application in applications:
            for line in lines:
                is_known = not _is(line, "server") or _SERVER.fullmatch(line)
                _require(is_known, "leave Serve's proxy out", f"{line.strip()!r} is not known")
            replicas = [line for line in lines if not backup_listener.is_backup(line)]
            limits = backup_listener.build_answer_limit(application, errors)
            replicas += backup_listener.refuse_grpc(application, replicas, errors)
            for way, (_, own) in WAYS.items():
                result[f"backend {way}-{application}"] = [*limits, *own.splitlines(), *replicas]
    return result


def _select_root(lines_of: Mapping[str, list[str]], grpc_front: list[str]) -> None:
    """Select, for calls without the metadata `application`, what has the root over HTTP.

    Serve does so for an only application: a second one would take such calls from the first.
    """
    roots = [match[1] for line in lines_of[FRONTS[0]] if (match := _HAS_ROOT.fullmatch(line)) is not None]
    for root in roots:
        if f"backend grpc-{root}" in lines_of:
            last = next(number for number, line in enumerate(grpc_front) if _is(line, "default_backend"))
            if grpc_front[last].endswith(" default_grpc_backend"):
                grpc_front.insert(last, f"    use_backend grpc-{root} if !{{ req.hdr(application) -m found }}")


def _http1_first(lines: list[str]) -> list[str]:
    """Rules that select the HTTP/1.1 backends, each before the rule that selects a replica's gRPC server."""
    result: list[str] = []
    for line in lines:
        if rule := _TO_GRPC.fullmatch(line):
            also = (rule[2] or " if").removeprefix(" if")
            for way, (condition, _) in WAYS.items():
                result.append(f"    use_backend {way}-{rule[1]} if {{ {condition} }}{also}")
        result.append(line)
    return result


def _defaults(lines: list[str]) -> list[str]:
    codes = {line.split()[1] for line in lines if _is(line, "errorfile")}
    _require(codes == {"502", "503", "504"}, "replace Serve's error files", f"there are those of {sorted(codes)}")
    others = [line for line in lines if not _is(line, "errorfile")]
    timeouts = [f"    timeout http-request {REQUEST_TIMEOUT_S}s", f"    timeout check {CHECK_TIMEOUT_S}s"]
    return [*others, "    option dontlog-normal", *timeouts, "    errorfiles shoal"]


def _answers() -> list[str]:
    """Rules that replace Serve's plain-text errors by the protocol's body.

    The status stays, except 404: Serve answers it only for a missing application, which is 503.
    """
    said = {code: 503 if code == 404 else code for code in ERRORS}
    known = [
        f"    http-response return status {ours} errorfiles shoal if {{ status {code} }}" for code, ours in said.items()
    ]
    return [*known, "    http-response return status 500 errorfiles shoal"]


def find_only_replica(config: str, front: Mapping[str, Any], pid: int) -> shared_listener.Mark | None:
    """The replica that may answer clients itself: the only one of the only application, which has the root, where
    HAProxy neither decrypts nor takes a client's address from a header. None where there is no such replica.

    config: Serve's; pid: HAProxy's process
    """
    sections = _sections(config)
    lines, applications = sections[FRONTS[0]], [head for head in sections if head.startswith("backend http-")]
    if len(applications) != 1 or front.get("trusts") or " ssl " in front.get("options", {}).get("http", ""):
        return None
    servers = [
        each for each in sections[applications[0]] if _is(each, "server") and not backup_listener.is_backup(each)
    ]
    has_root = any(_HAS_ROOT.fullmatch(line) for line in lines)
    if len(servers) != 1 or not has_root or every_node.refuse_health(lines) or front.get("hosts") == []:
        return None
    (bind,) = (match for line in lines if (match := _BIND.fullmatch(line)))
    address = every_node.use_node_address(servers, front.get("address", ""))[0].split()[2]
    return shared_listener.Mark(address, pid, int(bind[2]))


def main(config: str, errors: str) -> None:
    """Rewrite the file `config` in place; on failure, print one line on standard error."""
    path = Path(config)
    try:
        front = every_node.read_front(Path(errors).parent / FRONT_FILE, path.parent.name)
        config = path.read_text()
        path.write_text(rewrite(config, errors, front))
        # The shell that has started this process becomes HAProxy.
        shared_listener.write_mark(find_only_replica(config, front or {}, os.getppid()), path.parent)
    except TemplateMismatch as error:
        sys.exit(f"shoal: {error}")
