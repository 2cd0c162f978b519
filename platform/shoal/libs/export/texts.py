"""The texts of an exported folder: its entry points, Dockerfile and page."""

from __future__ import annotations

import re
import sys

from shoal.libs.export.runtime.model import ModelDescription

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
