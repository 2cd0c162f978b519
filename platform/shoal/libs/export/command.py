"""`shoal export`: a registered model as a folder that serves itself, or for a game. Parse, call, print."""

from __future__ import annotations

import os

import click

from shoal.libs.export.export_model import ExportReport, ExportSpec, export_model


@click.command()
@click.argument("model", metavar="NAME[@VERSION]|RUN")
@click.argument("overrides", nargs=-1, metavar="[A=B]...")
@click.option(
    "--to", required=True, metavar="container|lambda|game", help="An HTTP server, a function of AWS Lambda, or a game."
)
@click.option("--into", metavar="FOLDER", help="The folder.  [default: NAME-container, NAME-lambda or NAME-game]")
@click.option("--replace", is_flag=True, help="Replace a folder that is an export of the same model.")
@click.option("--example", "examples", multiple=True, metavar="FILE", help="A request (JSON) to compare and to store.")
def export(
    model: str, overrides: tuple[str, ...], to: str, into: str | None, replace: bool, examples: tuple[str, ...]
) -> None:
    """Write a registered model as a folder that serves itself, or acts in a game, without Shoal, PyTorch and Ray.

    A folder that serves has the model as ONNX, a handler, pinned requirements, a Dockerfile, a page and a test. One for
    a game has a policy as ONNX and as JSON, and runtimes in GDScript, JavaScript, C# and C++. Its answers are compared
    with the registered model's before it appears, which it does complete or not at all.

    \b
    Examples:
      shoal export fashion@champion --to container
      shoal export ranker --to lambda --into build/ranker --replace
      shoal export grid@champion --to game
      shoal export detector --to container --example request.json max_batch_size=0 tolerance=1e-3
    """
    fields: dict[str, object] = {"model": model, "to": to, "replace": replace, "examples": list(examples)}
    fields |= {} if into is None else {"into": into}
    spec = ExportSpec.parse(fields).override(overrides)
    written = export_model(spec)
    if spec.to == "game":
        _print_game(written)
        return
    megabytes = written.size_bytes / 2**20
    click.echo(
        f"{written.model} is in {os.path.relpath(written.folder)}: {megabytes:.0f} MB unzipped, with its packages."
    )
    click.echo(
        f"Its answers differ from the registered model's by at most {written.difference:.2g}, relative to the largest"
        f" value; {written.num_examples} examples are stored."
    )
    click.echo(f"Test it: python {os.path.relpath(written.folder / 'test_folder.py')}")


def _print_game(written: ExportReport) -> None:
    runtimes = "" if written.warning else ", policy.json, and runtimes in GDScript, JavaScript, C# and C++"
    click.echo(f"{written.model} is in {os.path.relpath(written.folder)}: policy.onnx{runtimes}.")
    if written.warning:
        click.echo(f"The runtimes are left out, as {written.warning}: run policy.onnx.")
    click.echo(
        f"Its outputs differ from the registered policy's by at most {written.difference:.2g}, relative to the largest"
        f" or to 1; vectors.json has {written.num_examples} of them. README.txt says how a game takes it."
    )
