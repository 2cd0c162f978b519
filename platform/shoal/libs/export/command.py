"""`shoal export`: a registered model as a folder that serves itself, or for a game. Parse, call, print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from shoal.extend.cli import Texts, verb
from shoal.libs.export.export_model import ExportSpec, export_model


@verb(work="exporting")
def export(
    model: Annotated[str, "NAME[@VERSION]|RUN"],
    overrides: Annotated[Texts, "[A=B]..."] = (),
    *,
    to: Annotated[str, "--to container|lambda|game", "An HTTP server, a function of AWS Lambda, or a game."],
    into: Annotated[
        str | None, "--into FOLDER", "The folder.  [default: NAME-container, NAME-lambda or NAME-game]"
    ] = None,
    replace: Annotated[bool, "Replace a folder that is an export of the same model."] = False,
    examples: Annotated[Texts, "--example FILE", "A request (JSON) to compare and to store."] = (),
) -> Iterator[str]:
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
    folder = os.path.relpath(written.folder)
    if spec.to != "game":
        yield f"{written.model} is in {folder}: {written.size_bytes / 2**20:.0f} MB unzipped, with its packages."
        yield (
            f"Its answers differ from the registered model's by at most {written.difference:.2g}, relative to the"
            f" largest value; {written.num_examples} examples are stored."
        )
        yield f"Test it: python {os.path.relpath(written.folder / 'test_folder.py')}"
        return
    runtimes = "" if written.warning else ", policy.json, and runtimes in GDScript, JavaScript, C# and C++"
    yield f"{written.model} is in {folder}: policy.onnx{runtimes}."
    if written.warning:
        yield f"The runtimes are left out, as {written.warning}: run policy.onnx."
    yield (
        f"Its outputs differ from the registered policy's by at most {written.difference:.2g}, relative to the largest"
        f" or to 1; vectors.json has {written.num_examples} of them. README.txt says how a game takes it."
    )
