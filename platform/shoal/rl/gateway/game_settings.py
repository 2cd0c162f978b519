"""What a run tells its games, such as gravity or speed: by hand, or when the return is high enough.

The driver of the run reads its file once a second, which `shoal set` writes, and gives the gateway what holds; the
gateway sends it to the games, and counts the returns by its version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shoal.atomic_file import replace_synced
from shoal.home import file_lock
from shoal.rl.part_specs import Setting, SettingsRule

_SETTING: TypeAdapter[Setting] = TypeAdapter(Setting)
FILE = "settings.json"  # in the folder of the run, or of its policy
LOCK_TIMEOUT_S = 5.0


def begin_settings(folder: Path) -> None:
    """Write the file of a run, which `shoal set` finds, unless a resumed one has it."""
    if not (folder / FILE).exists():
        write_settings(folder, {}, 0)


def change_game_settings(run_folder: Path, changed: Mapping[str, Setting]) -> bool:
    """Change the settings of a run, of all its policies; False when it has no games."""
    paths = [*run_folder.glob(FILE), *run_folder.glob(f"*/{FILE}")]
    for folder in (path.parent for path in paths):
        with _lock(folder):
            values, num_rules = read_settings(folder)
            write_settings(folder, values | dict(changed), num_rules)
    return bool(paths)


def advance_settings(
    folder: Path,
    initial: Mapping[str, Setting],
    rules: Sequence[SettingsRule],
    mean_return: float,
    sent: Mapping[str, Setting],
) -> dict[str, Setting]:
    """The settings that hold now; the next rule has come into force if the mean return is high enough.

    mean_return: of episodes with the settings that were `sent`, which may be earlier ones
    """
    values, num_rules = read_settings(folder)
    if num_rules < len(rules) and mean_return >= rules[num_rules].above and sent == {**initial, **values}:
        with _lock(folder):
            values, _ = read_settings(folder)
            values = {**values, **rules[num_rules].set}
            write_settings(folder, values, num_rules + 1)
    return {**initial, **values}


def _lock(folder: Path) -> AbstractContextManager[None]:
    """The driver and `shoal set` change what they have read. Raises TimeoutError."""
    return file_lock(folder / f"{FILE}.lock", LOCK_TIMEOUT_S)


def read_settings(folder: Path) -> tuple[dict[str, Setting], int]:
    """The values that were set, by hand or by rules, and how many rules have come into force."""
    path = folder / FILE
    if not path.exists():
        return {}, 0
    content = json.loads(path.read_text())
    return content["values"], content["num_rules"]


def write_settings(folder: Path, values: Mapping[str, Setting], num_rules: int) -> None:
    replace_synced(folder / FILE, json.dumps({"values": dict(values), "num_rules": num_rules}).encode())


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Setting]:
    """`gravity=9` and the like. Raises ValueError for one without a value, and for what is no setting."""
    found: dict[str, Setting] = {}
    for pair in pairs:
        name, is_given, text = pair.partition("=")
        if not name or not is_given:
            raise ValueError(f"{pair!r} is no NAME=VALUE")
        text.encode()  # bytes that are no text
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        try:
            found[name] = _SETTING.validate_python(value)
        except ValidationError:
            raise ValueError(f"{name} is a finite number, a truth or a text, not {text!r}") from None
    return found
