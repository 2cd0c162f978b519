"""The code of a registered version: what is found, and that it is run whatever lies here now."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.registry import ModelFactory, Registry, Signature, code_import, model_code
from shoal.registry.code_import import activate_code, load_source
from shoal.registry.model_code import ModelCode, require_installed
from shoal.weights import WeightSnapshot
from typed import said

Write = Callable[[Mapping[str, str]], None]
PARTS = {
    "parts/__init__.py": "from .scale import FACTOR\n",
    "parts/scale.py": "FACTOR = 2\n",
    "parts/deep/__init__.py": "__all__ = ['most']\n",
    "parts/deep/most.py": "from ..scale import FACTOR\nDEPTH = FACTOR * 2\n",
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files of a project, whose folder is on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def register(factory: str = "net:make", **kwargs: Any) -> ModelFactory:
    return ModelFactory(factory=factory, kwargs=kwargs).with_code()


def test_a_version_is_built_as_it_was_registered_whatever_is_edited(write: Write) -> None:
    write({"net.py": "from helper import FACTOR\ndef make(): return FACTOR\n", "helper.py": "FACTOR = 2\n"})
    first = register()
    assert first.build() == 2
    write({"helper.py": "FACTOR = 3\n"})
    second = register()
    assert (first.build(), second.build(), first.build()) == (2, 3, 2)
    assert first != second
    Path("net.py").unlink()
    assert ModelFactory.parse(first.model_dump(mode="json")).build() == 2
    assert {"net", "helper"}.isdisjoint(sys.modules)


@pytest.mark.parametrize(
    ("net", "answer"),
    [
        ("import parts.scale\ndef make(): return parts.scale.FACTOR\n", 2),
        ("import parts.scale as s\ndef make(): return s.FACTOR\n", 2),
        ("from parts import scale\ndef make(): return scale.FACTOR\n", 2),
        ("from parts import *\ndef make(): return FACTOR\n", 2),
        ("from parts.deep import *\ndef make(): return most.DEPTH\n", 4),
        ("def make():\n    from parts.scale import FACTOR\n    return FACTOR\n", 2),
        (
            "try:\n    import g\nexcept ImportError:\n    from parts.deep.most import DEPTH as d\ndef make(): return d",
            4,
        ),
    ],
    ids=["dotted", "renamed", "from", "star", "star of modules", "lazy", "relative"],
)
def test_every_import_statement_is_followed(write: Write, net: str, answer: int) -> None:
    write({"net.py": net, **PARTS})
    model = register()
    write(dict.fromkeys(["net.py", *PARTS], "raise SystemExit('edited')\n"))
    assert model.build() == answer


def test_a_package_keeps_its_name_in_relative_imports_and_files_beside_it(write: Write) -> None:
    text = "from pathlib import Path\nfrom .scale import FACTOR\nHERE = Path(__file__).parent\n"
    net = f"{text}def make(): return FACTOR, (HERE / 'words.txt').read_text(), (HERE / 'large.bin').exists()\n"
    write({**PARTS, "parts/net.py": net, "parts/words.txt": "a b", "parts/large.bin": "0" * (2**20 + 1)})
    model = register("parts.net:make")
    write({"parts/words.txt": "edited"})
    assert model.build() == (2, "a b", False), "the training's data are no part of a version"
    assert model.code is not None
    assert {"parts/__init__.py", "parts/net.py", "parts/scale.py", "parts/words.txt"} == set(model.code.files)


@pytest.mark.parametrize(
    "net",
    [
        b"\xef\xbb\xbfdef make(): return '\xc3\xa9'\n",
        "# -*- coding: latin-1 -*-\ndef make(): return 'é'\n".encode("latin-1"),
        "def make():\r\n    return 'é'\r\n".encode(),
        "try:\n    import bad\nexcept SyntaxError:\n    def make(): return 'é'\n".encode(),
    ],
    ids=["byte order mark", "latin-1", "Windows", "another that Python refuses"],
)
def test_sources_are_read_as_python_reads_them(write: Write, net: bytes) -> None:
    write({})
    Path("net.py").write_bytes(net)
    Path("bad.py").write_bytes(b"'\xe9'\n")
    assert ModelFactory.parse(register().model_dump(mode="json")).build() == "é"


def test_modules_that_are_links_are_stored_where_the_links_are(write: Write) -> None:
    write({"shared/v2/scale.py": "FACTOR = 2\n", "parts/__init__.py": ""})
    write(
        {"net.py": "from parts.scale import FACTOR\nfrom more.scale import FACTOR as F\ndef make(): return FACTOR, F\n"}
    )
    Path("parts/scale.py").symlink_to(Path("shared/v2/scale.py").resolve())
    Path("more").symlink_to("shared/v2")
    model = register()
    assert model.build() == (2, 2)
    assert model.code is not None
    assert set(model.code.files) == {"net.py", "parts/__init__.py", "parts/scale.py", "more/scale.py"}


def test_a_module_that_imports_the_file_of_the_task_takes_its_text_as_it_was_loaded(write: Write) -> None:
    write({"mine.py": "import helper\r\n# edited\r\n", "helper.py": "import mine\n"})
    model = register("shoal.train.export.model_entry:build", task="mine.py:Mine", source="import helper\n")
    assert model.code is not None
    assert model.code.files == {"mine.py": "import helper\n", "helper.py": "import mine\n"}


def test_a_namespace_package_has_modules_of_the_project_and_installed_ones(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    write({"site-packages/acme/core/__init__.py": "", "site-packages/acme/core/k.py": "K = 2\n"})
    net = "import acme.core.k\nfrom acme import core\nfrom acme.core.k import K\nfrom . import scale\n"
    write({"acme/net.py": f"{net}def make(): return acme.core.k.K, core.k.K, K, scale.F\n", "acme/scale.py": "F = 3\n"})
    model = register("acme.net:make")
    write({"acme/scale.py": "F = 5\n"})
    assert model.build() == (2, 2, 2, 3)
    assert model.code is not None
    assert set(model.code.files) == {"acme/net.py", "acme/scale.py"}


@pytest.mark.parametrize(
    "path",
    [
        "HERE / 'data' / 'en' / 'words.txt'",
        "os.path.join(os.path.dirname(__file__), 'data', 'en', 'words.txt')",
        "DATA / 'words.txt'",
        "HERE.joinpath('data/en', 'words.txt')",
        "HERE / '..' / 'parts' / 'data' / 'en/words.txt'",
    ],
)
def test_a_file_in_a_folder_beside_a_module_is_stored(write: Write, path: str) -> None:
    text = "import os\nfrom pathlib import Path\nHERE = Path(__file__).parent\nDATA = HERE / 'data' / 'en'\n"
    write({"parts/net.py": f"{text}def make(): return Path({path}).read_text()\n", "parts/data/en/words.txt": "a b"})
    model = register("parts.net:make")
    write({"parts/data/en/words.txt": "edited"})
    assert model.build() == "a b"


def test_a_trainings_many_small_files_are_left_out(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_code, "MAX_CODE_BYTES", 1000)
    names = ["words.txt", *(f"{number}.csv" for number in range(9))]
    write({"net.py": f"FILES = __file__, 'data', {names}\ndef make(): return 1\n", "data/words.txt": "a b"})
    write({f"data/{name}": "0" * 200 for name in names[1:]})
    model = register()
    assert model.code is not None
    assert set(model.code.files) == {"net.py", "data/words.txt", "data/0.csv", "data/1.csv"}


def test_secrets_are_no_part_of_a_version(write: Write) -> None:
    names = [".env", ".aws/credentials", "tls.key", "server.pem", "words.txt"]
    write({"net.py": f"FILES = __file__, '.aws', {names}\ndef make(): return 1\n", **dict.fromkeys(names, "secret")})
    assert set((register().code or ModelCode()).files) == {"net.py", "words.txt"}


def test_a_binary_file_beside_a_module_is_stored(write: Write) -> None:
    write({"net.py": "from pathlib import Path\ndef make(): return Path(__file__).with_name('t.bin').read_bytes()\n"})
    Path("t.bin").write_bytes(b"\xff\x00\xfe")
    model = register()
    Path("t.bin").unlink()
    assert ModelFactory.parse(model.model_dump(mode="json")).build() == b"\xff\x00\xfe"


def test_the_source_of_a_file_takes_its_modules_along(write: Write) -> None:
    """As of a Task's file, whose text is in the arguments."""
    source = "from parts.scale import FACTOR\ndef find(): return FACTOR\n"
    write({**PARTS, "mine.py": source, "net.py": "def make(task, source): return task\n"})
    model = register(task="mine.py:Mine", source=source)
    write({"parts/scale.py": "FACTOR = 5\n", "parts/__init__.py": "FACTOR = 5\n"})
    with activate_code(model.code):
        assert load_source(source, "mine.py:Mine", "source").find() == 2
    assert load_source(source, "mine.py:Mine", "source").find() == 5
    assert model.code is not None
    assert model.code.files["mine.py"] == source


def test_a_factory_within_another_keeps_its_code(write: Write) -> None:
    outer = "from shoal.registry import ModelFactory\ndef make(member): return ModelFactory.parse(member).build(), 1\n"
    write({"net.py": "def make(): return 2\n", "outer.py": outer})
    member = register()
    write({"net.py": "def make(): return 3\n"})
    model = register("outer:make", member=member.model_dump())
    assert model.build() == (2, 1)
    assert set((model.code or ModelCode()).files) == {"outer.py"}


def test_hooks_run_the_stored_code_too(write: Write) -> None:
    write(
        {"hooks.py": "def scale(**_):\n    from helper import K\n    return lambda arrays: K\n", "helper.py": "K = 2\n"}
    )
    model = ModelFactory(format="onnx", preprocess="hooks:scale").with_code()
    write({"helper.py": "K = 3\n"})
    assert model.make_hook("preprocess")({}) == 2
    assert model.make_hook("postprocess") is None


def test_packages_are_recorded_and_a_difference_is_named_once(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write({"net.py": "import numpy\nimport yaml\ndef make(): return 1\n"})
    model = register()
    assert model.code is not None
    assert set(model.code.packages) == {"numpy", "PyYAML"}
    monkeypatch.setattr(model_code, "_find_release", lambda name: "0.0")
    monkeypatch.setattr(code_import, "_compared", set())
    with caplog.at_level(logging.WARNING):
        model.build()
        model.build()
    (record,) = caplog.records
    assert f"numpy {model.code.packages['numpy']}, here 0.0" in record.getMessage()
    assert "shoal" in (ModelFactory(factory="shoal.models.lenet:LeNet").with_code().code or ModelCode()).packages


def test_code_that_is_too_large_is_refused_by_its_largest_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_code, "MAX_CODE_BYTES", 1000)
    write({"net.py": "import table\ndef make(): return 1\n", "table.py": f"TABLE = '{'0' * 1000}'\n"})
    with pytest.raises(ConfigError, match=r"model\.code.*largest file is table\.py"):
        register()


def test_stored_files_that_somebody_edits_are_written_again(write: Write, tmp_path: Path) -> None:
    write({"net.py": "import inspect\ndef make(): return inspect.getsource(make)\n"})
    model = register()
    assert model.code is not None
    stored = tmp_path / "home" / "code" / model.code.sha256[:16] / "net.py"
    stored.parent.mkdir(parents=True)
    stored.write_text("def make(): return 'edited'\n")
    assert model.build() == "def make(): return inspect.getsource(make)\n"


def test_code_installed_refuses_what_does_not_lie_here(write: Write) -> None:
    source = "class Mine: ...\n"
    files = {"net.py": "from helper import K\ndef make(**_): return K\n", "helper.py": "K = 2\n", "mine.py": source}
    write(files)
    nested = register().model_dump()
    model = register(task="mine.py:Mine", source=source, member=nested).model_dump()
    require_installed(model)
    for path, problem in (("helper.py", "differs from"), ("mine.py", "differs from")):
        write({path: f"{files[path]}# edited\n"})
        with pytest.raises(ConfigError, match=rf"code = 'installed': .*{path}.*{problem}"):
            require_installed(model)
        write({path: files[path]})
    require_installed(model)
    Path("helper.py").unlink()
    with pytest.raises(ConfigError, match=r"helper\.py is missing here"):
        require_installed(model)
    with pytest.raises(ConfigError, match="can contain code"):
        require_installed(ModelFactory(format="torchscript").with_code().model_dump())


def test_code_installed_runs_no_text_and_no_file_that_only_the_manifest_has(write: Write) -> None:
    write({})
    Path("mine.py").write_bytes(b"class Mine:\r\n    pass\r\n")
    kwargs = {"task": "mine.py:Mine", "args": {}, "source": Path("mine.py").read_text()}
    model = register("shoal.train.export.model_entry:build", **kwargs).model_dump()
    require_installed(model)
    pickled = {"args": {"encoders": {"pickle": "gASVAA=="}}}
    for changed in ({"source": "evil"}, {"source": "evil", "task": ""}, {"network": [{"source": "evil"}]}, pickled):
        with pytest.raises(ConfigError, match=r"code = .installed."):
            require_installed({**model, "kwargs": {**kwargs, **changed}})
    member = {"preprocess": "evil:hook", "code": {"binary": {"evil.so": "AAAA"}}}
    with pytest.raises(ConfigError, match=r"evil\.so is missing here"):
        require_installed({**model, "kwargs": {**kwargs, "member": member}})


@pytest.mark.parametrize("path", ["../../net.py", "/net.py", "parts/../../net.py", "parts//net.py", ""])
def test_code_lies_below_its_folder(path: str) -> None:
    for field in ("files", "binary"):
        with pytest.raises(ConfigError, match="no path below"):
            ModelCode.parse({field: {path: ""}})


def test_the_code_of_versions_is_shown_and_compared(write: Write) -> None:
    for factor in (2, 30):
        write({"net.py": "from helper import K\ndef make(width): return K\n", "helper.py": f"K = {factor}\n"})
        model = ModelFactory(factory="net:make", kwargs={"width": factor})
        Registry().register("net", WeightSnapshot.of(1, {}), model=model, signature=Signature(inputs=[], outputs=[]))
    shown = said("models show net@1 --code")
    assert shown == "# helper.py\nK = 2\n\n# net.py\nfrom helper import K\ndef make(width): return K\n\n"
    assert "helper.py, net.py" in said("models show net@1")
    compared = said("models diff net@1 net@2")
    assert (
        compared == "argument width: 2 -> 30\n--- net@1/helper.py\n+++ net@2/helper.py\n@@ -1 +1 @@\n-K = 2\n+K = 30\n"
    )
