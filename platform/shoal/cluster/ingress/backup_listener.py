"""What answers when no replica can: sections that `haproxy_config` adds to Serve's. Imports the standard library only.

Serve sends the requests of an application without a replica to a proxy of its own, which holds them until a replica has
started. That suits an application that may scale to zero (its file lies in the folder `asleep`; see
`serve_environment.hold_while_asleep`): it is *asleep*, and HAProxy holds a request `HOLD_S` at most. It refuses at once
what a replica would refuse, without a key or for no path of an endpoint, so that this starts none. Any other
application without a replica is *dead*: a listener of HAProxy's own, before Serve's proxy, answers 503 with Retry-After
at once, and requests that a dying replica had in hand end there too, unless another replica takes them.

HAProxy closes a client's connection without an answer if a request fails that was not the first on it. So no request
may fail at the last attempt. One that is complete in a buffer (`tune.bufsize`) is sent again, and the listener is
always there to answer it. One that is not sent again (a large body, a change of the endpoint) takes a second pass
through HAProxy, on a connection of its own: there it is the first, and its failure has a status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from shoal.cluster.ingress.time_limits import CHANGE_S, HOLD_S

# Connections: more wait. A front never takes those that the second pass and the listener need to answer it. HAProxy
# starts only where it may have 2.6 descriptors for each: 16,000 of them.
MAX_HTTP = 3840
MAX_RETURNED = 512
MAX_GRPC = 1024
MAX_SECOND_PASS = 512
MAX_UNAVAILABLE = 256
MAX_CONNECTIONS = MAX_HTTP + MAX_RETURNED + MAX_GRPC + MAX_SECOND_PASS + MAX_UNAVAILABLE
ASLEEP_HEADER = "x-shoal-asleep"  # names the application to the listener
# By the end of the path, what the listener answers for one that sleeps. A balancer that left it out would not wake it.
ABOUT = {
    "shoal/v1/status": '{"endpoint":"%[req.hdr(x-shoal-asleep)]","ready":true,"asleep":true}',
    "v2/health/live": '{"live":true}',
    "v2/health/ready": '{"ready":true}',
    "metrics": "",
}
# A change that a dying replica had in hand may have been made: nothing may repeat it by itself.
UNREPEATED = (
    "    http-request set-var(txn.change) bool(true) if {}",
    "    http-after-response del-header retry-after if {{ var(txn.change) -m bool }}",
)
REFUSED = json.dumps({"error": "the endpoint is asleep: send it a prediction, then the change"})
SPENT = json.dumps({"error": "scale.budget is spent: come again in its next period, or raise it"})
# HAProxy holds no call of gRPC: Serve's proxy, which could hold one, cannot pass the trailers of its answer on.
GRPC_REFUSED = "the endpoint is asleep: send it a prediction over HTTP, which wakes it, then the call"
MAX_HELD = 512  # requests of a sleeping application: Serve's proxy has each in memory, and one replica gets all
# A request whose deadline no start can meet is held so long, in which it wakes the endpoint all the same: else one with
# short deadlines alone would sleep on.
WAKING_MS = 250

# Reads the body to its end first: while a client is sending, an answer and a closed connection reach it as an error.
SERVICE = """\
core.register_service("unavailable", "http", function(applet)
    while #applet:receive(65536) > 0 do end
    local body = '{body}'
    applet:set_status(503, "Service Unavailable")
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", #body)
    applet:add_header("retry-after", "1")
    applet:start_response()
    applet:send(body)
end)
local function read_mark(mark)
    local file = io.open(mark)
    if not file then return 0, 0, 0 end
    local until_s, start_s, began_at_s = file:read("n", "n", "n")
    file:close()
    return until_s or 0, start_s or 0, began_at_s or 0
end
core.register_fetches("refused_s", function(txn, mark)
    return math.max(0, read_mark(mark) - core.now().sec)
end)
core.register_fetches("wait_ms", function(txn, mark)
    local deadline_ms = tonumber(txn.sf:req_hdr("shoal-deadline-ms")) or 0
    local _, start_s, began_at_s = read_mark(mark)
    local now = core.now()
    local gone_s = began_at_s > 0 and now.sec + now.usec / 1e6 - began_at_s or 0
    if deadline_ms < 1000 * (start_s - gone_s) then deadline_ms = math.min(deadline_ms, {waking_ms}) end
    return deadline_ms > 0 and deadline_ms < {hold_ms} and math.ceil(deadline_ms) or 0
end)
""".replace("{waking_ms}", str(WAKING_MS)).replace("{hold_ms}", f"{1000 * HOLD_S:.0f}")
UNAUTHORIZED = json.dumps({"error": "a known key is required: Authorization: Bearer KEY"})
NO_PATH = json.dumps({"error": "no such path"})
LATE = json.dumps({"error": "the endpoint is asleep, and no replica has started in time; try again later"})
# What a replica answers, as `serve.http.routes` has it, but for what does not wake an endpoint.
_MODEL = "v2/models/[^/]+(/versions/[^/]+)?(/(ready|config|stats|infer|rows))?"
_TEXT = "v1/(chat/completions|completions|responses|messages(/count_tokens)?|embeddings|models(/[^/]+)?)"
PATHS = f"({_MODEL}|{_TEXT}|v2|v2/repository/index|shoal/v1/episodes|openapi.json)/?"
_ADMIN_SOCKET = re.compile(r" *stats socket (\S+)/\S+ .*")
_SELECTION = re.compile(r" *use_backend http-(\S+) if (.*)")
_BACKUP = re.compile(r" *server \S+ \S+ check backup")

Sections = dict[str, list[str]]


def find_socket_folder(sections: Sections) -> str | None:
    """The folder of HAProxy's unix sockets, private to its user; None when there is no admin socket."""
    result = [match[1] for line in sections["global"] if (match := _ADMIN_SOCKET.fullmatch(line))]
    return result[0] if result else None


def is_backup(line: str) -> bool:
    """Whether a line of a back end is Serve's own proxy."""
    return _BACKUP.fullmatch(line) is not None


def may_sleep(application: str, errors: str) -> bool:
    """Whether an application without a replica is asleep: see `serve_environment.hold_while_asleep`.

    errors: the folder of HAProxy's own answers, or another file beside it
    """
    return find_mark(application, errors).exists()


def find_mark(application: str, errors: str) -> Path:
    """The file that marks an application that may sleep: see `serve_environment.write_sleep_mark`."""
    return Path(errors).parent / "asleep" / application


def _hold(application: str, errors: str) -> list[str]:
    """The rules for the requests of an application that sleeps, but for what asks only how it is, and changes."""
    mark = find_mark(application, errors)
    # The SHA-256 of each of its keys, in upper-case hex, a line each; no file if it needs none.
    keys = Path(errors).parent / "keys" / application
    rule, kind = "    http-request", "content-type application/json string"
    rules = []
    if keys.exists():
        known = [f"{{ {key},sha2(256),hex -m str -f {keys} }}" for key in ("http_auth_bearer", "req.hdr(x-api-key)")]
        rules.append(f"{rule} return status 401 {kind} '{UNAUTHORIZED}' unless {' or '.join(known)}")
    path = f"^(/{re.escape(application)})?/{PATHS}$"
    return [
        *rules,
        f"{rule} return status 404 {kind} '{NO_PATH}' unless {{ path -m reg {path} }}",
        f"{rule} set-var(txn.refused_s) lua.refused_s({mark})",
        f"{rule} return status 503 {kind} '{SPENT}' hdr retry-after %[var(txn.refused_s)]"
        " if { var(txn.refused_s) -m int gt 0 }",
        f"{rule} return status 503 errorfiles shoal if {{ be_conn gt {MAX_HELD} }}",
        f"{rule} set-var(txn.wait_ms) lua.wait_ms({mark})",
        f"{rule} set-timeout server var(txn.wait_ms) if {{ var(txn.wait_ms) -m int gt 0 }}",
        f"    timeout server {HOLD_S:g}s",
        f"    errorfile 504 {errors}/late.http",
        "    http-after-response set-status 504 if { var(txn.wait_ms) -m int gt 0 } { res.hdr(shoal-late) -m found }",
        "    http-after-response del-header shoal-late",
    ]


def build_answer_limit(application: str, errors: str) -> list[str]:
    """The line that limits the wait for an application's answers: see `serve_environment.limit_answers`."""
    mark = Path(errors).parent / "answers" / application
    return [f"    timeout server {mark.read_text()}"] if mark.exists() else []


def add_backup(application: str, lines: list[str], folder: str, errors: str) -> list[str]:
    """The lines of an application's back end, with the listener before Serve's proxy; without it, if it may sleep."""
    backups = [line for line in lines if is_backup(line)]
    rest = [line for line in lines if not is_backup(line)]
    if backups and may_sleep(application, errors):
        if any(line.split()[0] == "server" for line in rest):
            return [*build_answer_limit(application, errors), *lines]
        return [*lines, *_hold(application, errors)]
    # HAProxy uses the first backup that is up. Serve's stays, since Serve waits until each application has a replica or
    # this one up.
    own = build_answer_limit(application, errors)
    return [*own, *rest, f"    server unavailable unix@{folder}/u.sock no-check backup", *backups]


def refuse_grpc(application: str, replicas: list[str], errors: str) -> list[str]:
    """The rule for calls of gRPC while an application sleeps."""
    if not may_sleep(application, errors) or any(line.split()[0] == "server" for line in replicas):
        return []
    status = f"hdr grpc-status 14 hdr grpc-message '{GRPC_REFUSED}'"
    return [f"    http-request return status 200 content-type application/grpc {status}"]


def add_undisturbing(sections: Sections, errors: str, folder: str, front: str, is_change: str) -> None:
    """For applications that may sleep, a second back end for what must not wake them: who asks how one is, and changes,
    whose client may be gone, and ask again, before a replica carries them out.

    It has the same replicas, and the listener in place of Serve's proxy, also while the last replica stops.
    """
    paths = "|".join(ABOUT)
    selections: list[str] = []
    for line in sections[front]:
        match = _SELECTION.fullmatch(line)
        if match is not None and may_sleep(match[1], errors):
            quiet = f"    use_backend quiet-{match[1]} if {match[2]}"
            selections += [f"{quiet} METH_GET {{ path -m reg ^(/[^/]+)?/({paths})$ }}"]
            selections += [f"{quiet} {is_change}"]
            replicas = [each for each in sections[f"backend http-{match[1]}"] if not is_backup(each)]
            name = f"    http-request set-header {ASLEEP_HEADER} {match[1]}"
            backup = f"    server unavailable unix@{folder}/u.sock no-check backup"
            sections[f"backend quiet-{match[1]}"] = [name, *replicas, backup]
        selections.append(line)
    sections[front] = selections


def select_second_pass(front: list[str], is_change: str) -> list[str]:
    """The lines of `front`, with rules before those that select an application."""
    first = next(number for number, line in enumerate(front) if line.split()[0].endswith("_backend"))
    return [
        *front[:first],
        *(rule.format(is_change) for rule in UNREPEATED),
        "    http-request set-var(txn.received) req.body_len",
        "    use_backend shoal_second if { req.body_size,sub(txn.received) gt 0 }",
        "    use_backend shoal_second if { req.hdr(transfer-encoding) -m found }",
        f"    use_backend shoal_second if {is_change}",
        *front[first:],
    ]


def build_sections(front: Sequence[str], folder: str, once: str) -> Sections:
    """The sections of the listener and of the second pass, which selects an application as `front` does.

    once: the rule that a change is sent once
    """
    selections = [line for line in front if re.match(" *(acl is_|use_backend|default_backend)", line)]
    unavailable = [f"    bind unix@{folder}/u.sock mode 600", f"    maxconn {MAX_UNAVAILABLE}"]
    unavailable += ["    option httpclose"]
    for path, body in ABOUT.items():
        content = f" content-type application/json lf-string '{body}'" if body else ""
        asked = f"{{ req.hdr({ASLEEP_HEADER}) -m found }} METH_GET {{ path -m reg ^(/[^/]+)?/{path}$ }}"
        unavailable.append(f"    http-request return status 200{content} if {asked}")
    refused = f"content-type application/json string '{REFUSED}'"
    unavailable.append(f"    http-request return status 503 {refused} if {{ req.hdr({ASLEEP_HEADER}) -m found }}")
    unavailable.append("    http-request use-service lua.unavailable")
    # The time limits are those of the second pass.
    second = [f"    timeout server {CHANGE_S:g}s", f"    server second unix@{folder}/s.sock"]
    second_front = [f"    bind unix@{folder}/s.sock mode 600", f"    maxconn {MAX_SECOND_PASS}", "    option httpclose"]
    return {
        "frontend shoal_unavailable": unavailable,
        "backend shoal_second": second,
        "frontend shoal_second": [*second_front, once, *selections],
    }
