"""The code of clients that send one request: Python, JavaScript and curl. Texts to copy, which run as they stand.

None has the access token: each reads it where it lies.
"""

from __future__ import annotations

import json
import shlex
from pprint import pformat
from typing import Any
from urllib.parse import quote

from shoal.extend.cli import begin_curl

MAX_INLINE_CHARS = 2000
REQUEST_FILE = "request.json"  # of a longer request, which the page saves

_PYTHON = """\
{imports}from shoal.client import Client
from shoal.client.discovery import token_for

url = {url!r}
request = {request}
with Client(url, token=token_for(url)) as client:
    {call}
"""
_INFER = """\
inputs = {{each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in request["inputs"]}}
    answer = client.infer({model!r}, inputs{option})
    print(answer.version, answer.outputs)"""
_JAVASCRIPT = """\
// SHOAL_TOKEN="{token}" node request.mjs
{imports}const response = await fetch({url}, {{
  method: "POST",
  headers: {{ "authorization": `Bearer ${{process.env.SHOAL_TOKEN}}`, "content-type": "application/json" }},
  body: {body},
}});
console.log("version", response.headers.get("shoal-model-version"), await response.json());
"""


def write_code(url: str, model: str, action: str, content: Any, version: int | None = None) -> dict[str, str]:
    """`python`, `javascript` and `curl`; `file`: the name of the file that they read, "" where the request is in them.

    action:  `rows`: content is a row or a list of rows; `infer`: a request of the protocol
    version: None: the one that answers
    """
    text = json.dumps(content, ensure_ascii=False)
    is_long = len(text) > MAX_INLINE_CHARS
    of_version = "" if version is None else f"/versions/{version}"
    target = f"{url}/v2/models/{quote(model, safe='')}{of_version}/{action}"
    curl, token = begin_curl(target), begin_curl("").partition("Bearer ")[2].partition('" ')[0]
    imports = 'import { readFile } from "node:fs/promises";\n' if is_long else ""
    body = f'await readFile("{REQUEST_FILE}")' if is_long else f"JSON.stringify({text})"
    return {
        "python": _write_python(url, model, action, content, version, is_long=is_long),
        "javascript": _JAVASCRIPT.format(token=token, imports=imports, url=json.dumps(target), body=body),
        "curl": f"{curl} -d @{REQUEST_FILE}" if is_long else f"{curl} -d {shlex.quote(text)}",
        "file": REQUEST_FILE if is_long else "",
    }


def _write_python(url: str, model: str, action: str, content: Any, version: int | None, *, is_long: bool) -> str:
    standard = "import json\nfrom pathlib import Path\n\n" if is_long else ""
    third_party = "import numpy as np\n\n" if action == "infer" else ""
    option = "" if version is None else f", version={version}"
    request = (
        f'json.loads(Path("{REQUEST_FILE}").read_text())'
        if is_long
        else pformat(content, width=100, compact=True, sort_dicts=False)
    )
    rows = f"print(client.predict({model!r}, request{option}))"
    call = _INFER.format(model=model, option=option) if action == "infer" else rows
    return _PYTHON.format(imports=standard + third_party, url=url, request=request, call=call)
