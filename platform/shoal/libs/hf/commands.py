"""`shoal models push` and `pull`: versions as folders of Hugging Face, and such folders as versions.

Parse, call, print: `shoal.libs.hf.transfer` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import click

from shoal.extend.cli import VersionName, verb
from shoal.extend.registry import Registry
from shoal.libs.hf.kinds import KINDS


@verb(work="writing the folder")
def push(
    model: VersionName,
    folder: Annotated[Path, click.Path(path_type=Path, file_okay=False)],
    *,
    hub: Annotated[str, "--hub ORG/NAME", "Write the layout of the hub's cache below FOLDER."] = "",
    adapter: Annotated[bool, "Write the adapters alone, as peft does."] = False,
) -> str:
    """Write a version as a folder of Hugging Face: config.json, safetensors, tokenizer.

    Adapters are merged into their base, or written alone with --adapter: peft loads them. With --hub, FOLDER is a cache
    of the hub's, where transformers finds ORG/NAME without a network.

    \b
    Examples:
      shoal models push smollm2@champion ./smollm2
      shoal models push tuned@champion ./adapters --adapter
      shoal models push smollm2@3 ~/.cache/huggingface/hub --hub our-team/smollm2
    """
    from shoal.libs.hf.transfer import push as write_version  # here, where its seconds are reported

    version = Registry().get(model)
    return f"{version.ref} is in {write_version(version, folder, hub, adapter=adapter)} now."


@verb(work="registering the folder")
def pull(
    folder: str,
    *,
    name: Annotated[str, "The model's name in the registry."],
    kind: Annotated[str, "--kind KIND", f"Of {', '.join(KINDS)}; by default that of config.json."] = "",
    dtype: Annotated[str, "Of the weights: float32, bfloat16, or the folder's."] = "auto",
    alias: Annotated[str, "An alias for this version."] = "champion",
    base: Annotated[str, "--base MODEL", "Of adapters: a folder or NAME@VERSION; default: as they name it."] = "",
) -> Iterator[str]:
    """Register a folder of Hugging Face.

    Or a folder of peft's adapters, a GGUF file, or ORG/NAME of the hub's cache on this machine. Nothing is downloaded,
    and no code of the folder is executed.

    \b
    Examples:
      shoal models pull ./SmolLM2-135M-Instruct --name smollm2
      shoal models pull ./adapters --name tuned --base smollm2@1
      shoal models pull our-team/smollm2 --name smollm2 --dtype bfloat16
    """
    from shoal.libs.hf.transfer import pull as register_folder  # here, where its seconds are reported

    version = register_folder(folder, name, kind, dtype, alias, base)
    if version.problem:
        yield f"{version.ref} is registered; {version.decision}"
        yield f"It can be tuned, and an endpoint answers its tensors: shoal serve deploy {version.ref}"
        return
    yield f"{version.name}@{alias} is {version.ref} now. Serve it: shoal serve deploy {version.name}@{alias}"
    about = version.manifest
    if "base" in about.lineage and about.model.kwargs["task"] == KINDS["causal_lm"]:
        beside = f"{about.lineage['base']} endpoint.model.text.adapters='[{version.name}]'"
        yield f"Or beside its base, as the model BASE:{version.name}: shoal serve deploy {beside}"
