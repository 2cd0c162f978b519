"""The head of a run in the store: who writes the run, when it last did, and which object has its record.

Owns the names and the format of what the store has of a run. Called by `store_mirror`, which writes it while a run goes
on, and by `store_copies`, which reads the runs of other hosts. Each change of a head is conditional: one writer wins.
"""

from __future__ import annotations

import msgspec

from shoal.atomic_file import is_newer_format
from shoal.errors import RunError
from shoal.store import Store, Tagged

FORMAT = 1
HEADS = "run-heads"  # one listing shows all runs, however many objects their checkpoints have
_SUFFIX = ".json"


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """`run-heads/ID.json`.

    writer:   a random token of the process that records the run
    status:   that of the record
    record:   the key of the record, of this incarnation or, until it is written, of the one before
    revision: counts the records of an incarnation
    beat:     differs each time
    """

    format: int = FORMAT
    id: str
    host: str
    pid: int
    incarnation: int
    writer: str
    status: str
    record: str = ""
    revision: int = 0
    beat: int = 0
    is_removed: bool = False

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)


class _Format(msgspec.Struct):
    format: int


def head_key(run_id: str) -> str:
    return f"{HEADS}/{run_id}{_SUFFIX}"


def parse_head_key(key: str) -> str:
    """The run of a head; "" for another key."""
    return key.removeprefix(f"{HEADS}/").removesuffix(_SUFFIX) if key.endswith(_SUFFIX) else ""


def record_folder(run_id: str) -> str:
    return f"runs/{run_id}/record"


def record_key(run_id: str, incarnation: int) -> str:
    """Each incarnation has its own: a process that was taken for dead overwrites nothing of the next one."""
    return f"{record_folder(run_id)}/{incarnation:06d}.sqlite.z"


def read_head(store: Store, run_id: str) -> tuple[RunHead, Tagged]:
    """Raises FileNotFoundError, StoreError, and RunError for a head that is damaged or of a newer format."""
    tagged = store.read_tagged(head_key(run_id))
    return decode_head(run_id, tagged.payload), tagged


def decode_head(run_id: str, payload: bytes) -> RunHead:
    """Raises RunError for a head that is damaged or of a newer format."""
    try:
        reject_newer_format(run_id, msgspec.json.decode(payload, type=_Format).format, FORMAT)
        head = msgspec.json.decode(payload, type=RunHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RunError(f"{head_key(run_id)} in the store is damaged: {error}") from None
    if head.id != run_id:
        raise RunError(f"{head_key(run_id)} in the store is damaged: it is of the run {head.id!r}")
    return head


def reject_newer_format(run_id: str, found: int, known: int) -> None:
    """Raises RunError."""
    if is_newer_format(found, known):
        problem = f"was written to the store by a newer Shoal (format {found}; this one reads {known})"
        raise RunError(f"run {run_id!r} {problem}: upgrade Shoal")
