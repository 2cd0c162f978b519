"""Writes an exported folder: its entry points, Dockerfile and page, and copies of the modules that it runs.

A module is copied with its imports of ours made relative: the folder's package `runtime` is flat, and has no Shoal.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal.errors import ConfigError
from shoal.libs.export.runtime.model import DESCRIPTION_FILE, ModelDescription

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # which the pinned packages are installed for here

SERVER = '''"""The HTTP server: python server.py"""

from runtime.http_server import main

main()
'''
FUNCTION = '''"""The function: AWS Lambda calls lambda_function.handler."""

from pathlib import Path

from runtime.lambda_events import make_handler

handler = make_handler(Path(__file__).resolve().parent)
'''
TEST = '''"""Starts the handler here, and compares its answers with those in examples.json: python test_folder.py"""

from pathlib import Path

from runtime.{module} import {start}
from runtime.self_test import run_self_test


def test_folder() -> None:
    print(run_self_test(Path(__file__).resolve().parent, {start}))


if __name__ == "__main__":
    test_folder()
'''
CONTAINER_DOCKERFILE = f"""FROM python:{PYTHON}-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENV HOST=0.0.0.0 PORT=8000
EXPOSE 8000
USER nobody
CMD ["python", "server.py"]
"""
LAMBDA_DOCKERFILE = f"""FROM public.ecr.aws/lambda/python:{PYTHON}
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . ${{LAMBDA_TASK_ROOT}}
CMD ["lambda_function.handler"]
"""
DOCKERIGNORE = ".venv\nexamples.json\n__pycache__\n"

TOP = """# {name}, version {version}

The model `{name}` in ONNX, and what answers for it: {what}. Written by `shoal export`;
needs the packages of `requirements.txt`, and neither Shoal, PyTorch nor Ray.

It takes {inputs}
and gives {outputs} (-1: any size).

Test it here, without Docker:

    python -m venv .venv && .venv/bin/pip install -r requirements.txt{test_package}
    .venv/bin/python test_folder.py

"""
CONTAINER = """Run it here, or in a container:

    PORT=8000 .venv/bin/python server.py
    docker build -t {slug} . && docker run -p 8000:8000 {slug}

Call it, by the Open Inference Protocol v2:

    curl localhost:8000/v2/health/ready
    curl localhost:8000/v2/models/{name}
    curl localhost:8000/v2/models/{name}/infer -d @request.json

`HOST`, `PORT` and `NUM_THREADS` (of one forward, 1 by default) are environment variables. The server asks for no key
and speaks no TLS: put it behind what does.
"""
LAMBDA = """Deploy it as an image:

    docker build -t {slug} . && aws lambda create-function --function-name {slug} --package-type Image \\
      --code ImageUri=ACCOUNT.dkr.ecr.REGION.amazonaws.com/{slug}:latest --role ROLE --memory-size 1024 --timeout 30

or as a zip file ({megabytes} MB of 250 unzipped):

    pip install -r requirements.txt --target build --only-binary=:all: --platform manylinux_2_28_x86_64 \\
      --python-version {python}
    cp -r runtime lambda_function.py model.json model.onnx build && (cd build && zip -qr ../function.zip .)
    aws lambda create-function --function-name {slug} --runtime python{python} --handler lambda_function.handler \\
      --zip-file fileb://function.zip --role ROLE --memory-size 1024 --timeout 30

Call it plainly, with the body of an inference, or by a function URL or an HTTP API (payload format 2.0), whose paths
are those of the Open Inference Protocol v2:

    aws lambda invoke --function-name {slug} --cli-binary-format raw-in-base64-out \\
      --payload file://request.json answer.json
    curl https://URL/v2/models/{name}/infer -d @request.json

A request or answer has at most 6 MB, which is Lambda's limit. `NUM_THREADS` (of one forward, 1 by default) is an
environment variable.
"""


def format_page(description: ModelDescription, megabytes: int, test_package: str) -> str:
    """Format README.md.

    megabytes:    of the folder and its packages
    test_package: a further package that the test needs, pinned; "" for none
    """
    tensors = [
        ", ".join(f"`{each.name}` {each.datatype} {each.shape}" for each in side)
        for side in (description.inputs, description.outputs)
    ]
    is_container = description.target == "container"
    what = "an HTTP server" if is_container else "a function of AWS Lambda"
    values = {
        "name": description.name,
        "version": description.version,
        "what": what,
        "inputs": tensors[0],
        "outputs": tensors[1],
    }
    slug = re.sub("[^a-z0-9-]", "-", description.name.lower())  # of images and functions
    values |= {"slug": slug, "megabytes": megabytes, "python": PYTHON, "test_package": test_package}
    return (TOP + (CONTAINER if is_container else LAMBDA)).format(**values)


def format_test(target: str) -> str:
    """Format test_folder.py."""
    start = ("server_process", "start_server") if target == "container" else ("runtime_api", "start_function")
    return TEST.format(module=start[0], start=start[1])


DESCRIPTION_FILES = (DESCRIPTION_FILE, "policy.json")  # of a folder that serves itself, or is for a game
PACKAGE = "runtime"
MAX_LAMBDA_BYTES = 250 * 1024 * 1024  # of a function and its layers, unzipped
LAMBDA_CLIENT = "awslambdaric==4.2.2"  # of AWS, for the test of a folder
PACKAGES = ("msgspec", "numpy", "onnxruntime")  # which the runtime imports; the others are onnxruntime's own
COPIED = (
    "shoal.errors",
    "shoal.frame",
    "shoal.open_inference.binary_tensors",
    "shoal.open_inference.datatypes",
    "shoal.open_inference.json_tensors",
    "shoal.open_inference.messages",
    "shoal.open_inference.request_schema",
    "shoal.open_inference.rows",
    "shoal.serve.http.codec",
    "shoal.serve.http.response",
    "shoal.serve.http.routes",
    "shoal.serve.messages.infer_call",
    "shoal.serve.messages.model_errors",
    "shoal.serve.model.output_check",
    "shoal.serve.protocol.request_limits",
    "shoal.libs.export.runtime.model",
    "shoal.libs.export.runtime.onnx_session",
    "shoal.libs.export.runtime.self_test",
)
COPIED_FOR = {
    "container": ("shoal.libs.export.runtime.http_server", "shoal.libs.export.runtime.server_process"),
    "lambda": ("shoal.libs.export.runtime.lambda_events", "shoal.libs.export.runtime.runtime_api"),
}
HEADER = "# A part of Shoal, under the Apache License 2.0 (see LICENSE), copied by `shoal export`.\n"
_IMPORT = re.compile(r"^(\s*)from (shoal\.[\w.]+) import ", re.MULTILINE)


class _Description(msgspec.Struct):
    """What every export says of itself."""

    format: int
    name: str
    target: str


def require_target(into: Path, model: str, *, replace: bool) -> None:
    """Require that the folder can be written. Raises ConfigError unless it is absent, empty, or to be replaced and an
    export of the same model."""
    if not into.exists() or (into.is_dir() and not any(into.iterdir())):
        return
    if not into.is_dir():
        raise ConfigError("into", str(into), "is no folder", "name another")
    exported = None
    for file in DESCRIPTION_FILES:
        with suppress(OSError, msgspec.DecodeError):
            exported = msgspec.json.decode((into / file).read_bytes(), type=_Description).name
    if exported is None:
        raise ConfigError("into", str(into), "has files that are no export", "name another folder, or empty this one")
    if exported != model:
        problem, remedy = f"is an export of {exported!r}, not of {model!r}", "name another folder, or remove it"
        raise ConfigError("into", str(into), problem, remedy)
    if not replace:
        raise ConfigError("into", str(into), "is an export of this model", "--replace writes it anew")


def copy_runtime(folder: Path, target: str) -> None:
    """Copy what a folder of this target runs, and the license."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text(f'{HEADER}"""What this folder runs."""\n')
    modules = (*COPIED, *COPIED_FOR[target])
    names = {module: module.rpartition(".")[2] for module in modules}
    for module, name in names.items():
        source = inspect.getsource(import_module(module))
        source = _IMPORT.sub(lambda found: f"{found[1]}from .{names[found[2]]} import ", source)  # of copied ones alone
        (package / f"{name}.py").write_text(HEADER + source)
    copy_license(folder)


def copy_license(folder: Path) -> None:
    """Copy the license of what the folder has of ours."""
    text = distribution("shoal").read_text("licenses/LICENSE")
    assert text is not None, "the installed package has its license"
    (folder / "LICENSE").write_text(text)


def measure_folder(folder: Path) -> int:
    """The bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def list_requirements() -> dict[str, Distribution]:
    """List the packages and what they need, by name. Raises ConfigError for one that is not installed."""
    distributions: dict[str, Distribution] = {}
    to_visit = list(PACKAGES)
    while to_visit:
        name = canonicalize_name(to_visit.pop())
        if name in distributions:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError as error:
            problem = f"cannot be pinned: {name} is not installed here"
            raise ConfigError("requirements", name, problem, f"pip install {name}") from error
        needed = map(Requirement, distributions[name].requires or [])
        to_visit += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return dict(sorted(distributions.items()))


def format_requirements(distributions: dict[str, Distribution]) -> str:
    """The text of requirements.txt."""
    return "".join(f"{name}=={each.version}\n" for name, each in distributions.items())


def measure_packages(distributions: dict[str, Distribution]) -> int:
    """The bytes of their installed files."""
    paths = [str(file.locate()) for each in distributions.values() for file in each.files or []]
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def complete_folder(folder: Path, description: ModelDescription) -> int:
    """Write what runs, and the page; returns the size with the packages. Raises ConfigError beyond Lambda's limit."""
    packages, is_lambda = list_requirements(), description.target == "lambda"
    copy_runtime(folder, description.target)
    files = {
        "requirements.txt": format_requirements(packages),
        "Dockerfile": LAMBDA_DOCKERFILE if is_lambda else CONTAINER_DOCKERFILE,
        ".dockerignore": DOCKERIGNORE,
        "test_folder.py": format_test(description.target),
        "lambda_function.py" if is_lambda else "server.py": FUNCTION if is_lambda else SERVER,
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    size_bytes = measure_folder(folder) + measure_packages(packages)
    if is_lambda and size_bytes > MAX_LAMBDA_BYTES:
        problem = f"the folder has {size_bytes >> 20} MB with its packages, and Lambda takes {MAX_LAMBDA_BYTES >> 20}"
        raise ConfigError("to", description.target, problem, "export a smaller model, or to a container")
    test_package = f" {LAMBDA_CLIENT}" if is_lambda else ""
    (folder / "README.md").write_text(format_page(description, size_bytes >> 20, test_package))
    return size_bytes
