"""`shoal models push` and `pull`: versions as folders of Hugging Face, and such folders as versions.

Parse, call, print: `shoal.libs.hf.transfer` does the work.
"""

from __future__ import annotations

from pathlib import Path

import click

from shoal.extend.registry import Registry
from shoal.libs.hf.transfer import KINDS
from shoal.libs.hf.transfer import pull as register_folder
from shoal.libs.hf.transfer import push as write_version


@click.command()
@click.argument("model", metavar="NAME@VERSION")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--hub", default="", metavar="ORG/NAME", help="Write the layout of the hub's cache below FOLDER.")
@click.option("--adapter", is_flag=True, help="Write the adapters alone, as peft does.")
def push(model: str, folder: Path, hub: str, adapter: bool) -> None:
    """Write a version as a folder of Hugging Face: config.json, safetensors, tokenizer.

    Adapters are merged into their base, or written alone with --adapter: peft loads them. With --hub, FOLDER is a cache
    of the hub's, where transformers finds ORG/NAME without a network.

    \b
    Examples:
      shoal models push smollm2@champion ./smollm2
      shoal models push tuned@champion ./adapters --adapter
      shoal models push smollm2@3 ~/.cache/huggingface/hub --hub our-team/smollm2
    """
    version = Registry().get(model)
    click.echo(f"{version.ref} is in {write_version(version, folder, hub, adapter=adapter)} now.")


@click.command()
@click.argument("folder")
@click.option("--name", required=True, help="The model's name in the registry.")
@click.option("--kind", default="", metavar="KIND", help=f"Of {', '.join(KINDS)}; by default that of config.json.")
@click.option("--dtype", default="auto", show_default=True, help="Of the weights: float32, bfloat16, or the folder's.")
@click.option("--alias", default="champion", show_default=True, help="An alias for this version.")
@click.option(
    "--base", default="", metavar="MODEL", help="Of adapters: a folder or NAME@VERSION; default: as they name it."
)
def pull(folder: str, name: str, kind: str, dtype: str, alias: str, base: str) -> None:
    """Register a folder of Hugging Face.

    Or a folder of peft's adapters, a GGUF file, or ORG/NAME of the hub's cache on this machine. Nothing is downloaded,
    and no code of the folder is executed.

    \b
    Examples:
      shoal models pull ./SmolLM2-135M-Instruct --name smollm2
      shoal models pull ./adapters --name tuned --base smollm2@1
      shoal models pull our-team/smollm2 --name smollm2 --dtype bfloat16
    """
    version = register_folder(folder, name, kind, dtype, alias, base)
    if version.problem:
        click.echo(f"{version.ref} is registered; {version.decision}")
        click.echo(f"It can be tuned, and an endpoint answers its tensors: shoal serve deploy {version.ref}")
        return
    click.echo(f"{version.name}@{alias} is {version.ref} now. Serve it: shoal serve deploy {version.name}@{alias}")
    about = version.manifest
    if "base" in about.lineage and about.model.kwargs["task"] == KINDS["causal_lm"]:
        beside = f"{about.lineage['base']} endpoint.model.text.adapters='[{version.name}]'"
        click.echo(f"Or beside its base, as the model BASE:{version.name}: shoal serve deploy {beside}")
