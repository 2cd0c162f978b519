"""Where a model of Hugging Face is on this host, and what its folder says: configuration and tokenizer.

Called by the Tasks, and by `shoal models pull`. Asks no hub.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from shoal.atomic_file import hash_file, make_folder, sync_folder
from shoal.errors import ConfigError, needs_extra
from shoal.home import home

with needs_extra("hf"):
    import torch
    import transformers
for _name in ("torchao", "torch.utils._pytree"):  # of torchao, which transformers imports: each extension without a use
    logging.getLogger(_name).setLevel(logging.ERROR)

CONFIG = "config.json"
# Of a folder, what a version keeps beside its weights, so that it can be trained further and written again.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_version(model: str) -> bool:
    """Whether it names a version of the registry, NAME@VERSION, and nothing on this host."""
    return "@" in model and not Path(model).exists()


def make_model_name(model: str) -> str:
    """A name for the registry, of a folder, a file, `org/name` or NAME@VERSION."""
    name = Path(model.partition("@")[0] if is_version(model) else model).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]", "-", name).strip("._-") or "model"


def make_absolute(path: str) -> str:
    """The path of what is on this host: workers have another current folder. What is not there stays as it is."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def find_folder(model: str) -> Path:
    """The folder of a model, with a `config.json`.

    model: a folder, a GGUF file, or `org/name` in the hub's cache of this host

    Raises ConfigError.
    """
    path = Path(model)
    if not model:
        raise ConfigError("model", model, "is not given", "name a folder with config.json, as in model=./SmolLM2")
    if path.suffix == ".gguf" and path.is_file():
        return _convert_gguf(path)
    if path.is_dir():
        return _find_snapshot(path)
    if _HUB_NAME.fullmatch(model) and path.suffix != ".gguf":
        hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
        cache = Path(os.environ.get("HF_HUB_CACHE") or hub)  # where the hub's library keeps what it has downloaded
        if (cached := cache / f"models--{model.replace('/', '--')}").is_dir():
            return _find_snapshot(cached)
        download = f"hf download {model} --local-dir FOLDER"
        problem = f"is neither a folder nor in the hub's cache {cache}, and no hub is asked"
        remedy = f"`{download}` where there is a network, then copy FOLDER here: model=FOLDER"
        raise ConfigError("model", model, problem, remedy)
    known = "a folder, a GGUF file, ORG/NAME of the hub's cache on this machine, or NAME@VERSION of the registry"
    remedy = f"nothing is downloaded: give {known}; paths are looked up from {Path.cwd()}"
    raise ConfigError("model", model, f"is no {'file' if path.suffix == '.gguf' else 'folder'}", remedy)


def _find_snapshot(folder: Path) -> Path:
    """The folder itself, or the snapshot that `refs/main` names in the hub's layout."""
    if (folder / CONFIG).is_file():
        return folder.resolve()
    if (reference := folder / "refs" / "main").is_file():
        snapshot = folder / "snapshots" / reference.read_text().strip()
        if (snapshot / CONFIG).is_file():
            return snapshot.resolve()
    if (folder / "adapter_config.json").is_file():
        remedy = f"`shoal run finetune model={folder}` takes them; else give their base, and lora as they say"
        raise ConfigError("model", str(folder), "holds adapters without their base", remedy)
    problem = f"has no {CONFIG}"
    raise ConfigError("model", str(folder), problem, "give the folder that save_pretrained or the hub has written")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `config.json`. Raises ConfigError."""
    return read_json("model", folder / CONFIG)


def read_json(field: str, path: Path) -> dict[str, Any]:
    """A configuration in a file. Raises ConfigError."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(field, str(path), f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(field, str(path), "is no configuration")
    return config


def make_config(values: Mapping[str, Any]) -> Any:
    """The configuration as an object of transformers. Raises ConfigError for an unknown type of model."""
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        problem = f"is no type of model that transformers {transformers.__version__} has"
        remedy = "a model with code of its own cannot be loaded: nothing of a folder is executed"
        raise ConfigError("config.model_type", kind, problem, remedy)
    try:
        return transformers.AutoConfig.for_model(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError("config", kind, f"is refused by transformers: {error}") from error


@cache
def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises ConfigError."""
    remedy = "copy tokenizer.json and tokenizer_config.json into it"
    if not any((folder / name).exists() for name in COMPANIONS[:9]):
        raise ConfigError("model", str(folder), "has no tokenizer", remedy)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model", str(folder), f"has no tokenizer that can be loaded: {error}", remedy) from error
    if not tokenizer.is_fast:
        raise ConfigError("model", str(folder), f"has a slow tokenizer ({type(tokenizer).__name__})", remedy)
    return tokenizer


def read_companions(folder: Path) -> dict[str, bytes]:
    """The files of tokenizer and image processor, by name."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}


def hash_files(paths: Iterable[Path]) -> str:
    """Hex digest of the files' contents, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(bytes.fromhex(hash_file(path)))
    return digest.hexdigest()


@contextmanager
def open_draft() -> Iterator[Path]:
    """A folder in `$SHOAL_HOME/hf` that goes with its block; those of processes that were killed go at its begin."""
    folder, ours = home() / "hf", f".{socket.gethostname()}"
    make_folder(folder)
    for other in folder.glob(f"{ours}-*-*"):
        host, pid, _ = other.name.rsplit("-", 2)
        if host == ours and not psutil.pid_exists(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{ours}-{os.getpid()}-", dir=folder) as draft:
        yield Path(draft)


def make_cached_folder(key: str, write: Callable[[Path], None]) -> Path:
    """The folder of this key in `$SHOAL_HOME/hf`, written once: it appears complete or not at all."""
    folder = home() / "hf" / key
    if folder.is_dir():
        return folder
    with open_draft() as parent:
        draft = parent / key
        make_folder(draft)
        write(draft)
        sync_folder(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has written it meanwhile
                raise
    return folder


def _convert_gguf(path: Path) -> Path:
    """A folder of safetensors with what a GGUF file holds, in float32."""

    def write(draft: Path) -> None:
        where = {"gguf_file": path.name, "local_files_only": True}
        try:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
            config = loaded.config
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **where)
        except (OSError, ValueError, KeyError, NotImplementedError, ImportError) as error:
            raise ConfigError("model", str(path), f"cannot be converted by transformers: {error}") from error
        del config.quantization_config  # the loaded one takes itself for quantised, and refuses to be saved
        with torch.device("meta"):
            fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    return make_cached_folder(hash_files([path])[:32], write)
