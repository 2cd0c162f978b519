"""Libraries join the command line."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import MagicMock

import click
import pytest

import shoal
import shoal.extend.cli
import shoal.plugins.lazy
import shoal.runs.report
from shoal.cli import cli, find_commands
from shoal.errors import ConfigError, RunError
from shoal.extend import Library
from shoal.libs.grpc.methods import PATH_PREFIX
from shoal.plugins import find, library
from shoal.plugins.library import collect_extensions, find_libraries, find_sound_libraries
from shoal.registry.model_format import find_formats_of_files
from shoal.runs.panels import PANELS
from shoal.serve.protocol.request_lifecycle import EndpointApp
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.spec.endpoint import PROTOCOLS
from shoal.sync.config import VARIANTS, find_sync_config_type, list_kinds
from shoal.train.launch.predicted_cost import find_estimator
from typed import said, typed


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """A package with an entry point, as pip would install it."""
    (folder / "mine_of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    entry = EntryPoint("mine", "mine_of_this_test:LIBRARY", library.LIBRARIES)
    monkeypatch.setattr(library, "entry_points", lambda group: [entry] if group == library.LIBRARIES else [])
    monkeypatch.delitem(sys.modules, "mine_of_this_test", raising=False)
    forget_libraries()


def forget_libraries() -> None:
    find_libraries.cache_clear()
    find_sound_libraries.cache_clear()


@pytest.fixture(autouse=True)
def _find_anew() -> Iterator[None]:
    yield
    forget_libraries()


MINE = """
import click
from shoal.extend import Library

@click.command()
@click.argument("word")
def greet(word):
    click.echo(f"hello {word}")

LIBRARY = Library("mine", verbs={"greet": ("mine_of_this_test:greet", "Say hello.")})
"""


def test_a_package_adds_a_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, MINE)
    assert "Say hello." in said("--help")
    assert said("greet you") == "hello you\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("LIBRARY = 3", "is no shoal.extend.Library"),
        ("import nothing_like_it", "cannot be imported .*nothing_like_it"),
        ("1 / 0", "cannot be imported .*division by zero"),
        (MINE.replace('"greet"', '"plan"'), "the verb plan, which planning has too"),
        (MINE.replace('"greet"', '"run"'), "the verb run, which shoal has too"),
    ],
    ids=["no library", "broken", "raises", "a library's verb", "a verb of the platform"],
)
def test_a_package_that_does_not_fit_is_named(
    text: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, text)
    with pytest.raises(ConfigError, match=rf"shoal.libraries = .*mine.*{problem}"):
        find_commands()


@pytest.mark.parametrize("text", ["import nothing_like_it", "raise RuntimeError('nothing_like_it')"])
def test_a_broken_package_does_not_end_a_run(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its words are missing, and say why; those of others are there."""
    install(monkeypatch, tmp_path, text)
    assert "local_sgd" in list_kinds()
    assert find_sync_config_type("local_sgd").__name__ == "LocalSGDConfig"
    assert {"sweep", "stream"} <= collect_extensions(PANELS).keys()
    assert find_estimator() is not None
    assert not hasattr(shoal, "nothing_of_this_name")
    with pytest.raises(ConfigError, match=r"mine_of_this_test.*nothing_like_it"):
        find_sync_config_type("word_of_mine")


def test_an_extension_that_cannot_be_loaded_is_left_out_where_all_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is recorded and its metrics are copied, files are registered, an endpoint answers: with those of others."""

    def collect(group: str) -> dict[str, str]:
        return {"of another": "nothing_like_it:Thing", "math": "math:sqrt", **collect_extensions(group)}

    monkeypatch.setattr(find, "collect_extensions", collect)
    with shoal.runs.create("job", "", "one") as run:
        run.log(1, {"x": 1.0})
    assert len(list((run.folder / "tensorboard").iterdir())) == 1
    assert {".onnx", ".pt2"} <= find_formats_of_files().keys()
    manager = MagicMock()
    access = MagicMock()
    limits = RequestLimits()
    assert [path for path, _ in EndpointApp(MagicMock(), manager, access, limits)._others] == [PATH_PREFIX]
    assert "of another of shoal.protocols is left out: nothing_like_it:Thing cannot be loaded" in caplog.text
    assert "math of shoal.protocols is left out: math.sqrt() takes exactly one argument" in caplog.text
    for required, error in (("of another", "nothing_like_it"), ("math", "takes exactly one argument")):
        with pytest.raises((ValueError, TypeError), match=error):  # one that the endpoint was asked to speak
            EndpointApp(MagicMock(), manager, access, limits, required=[required])


def test_a_package_with_a_word_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "entry_points", lambda group: [EntryPoint("grpc", "theirs.fast:make", group)])
    with pytest.raises(ConfigError, match=r"shoal.protocols = 'grpc': .*theirs.fast:make, and of shoal.libs.grpc"):
        collect_extensions(PROTOCOLS)


def test_a_word_without_a_library_is_refused_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "collect_extensions", lambda group: {})
    with pytest.raises(
        ValueError, match="'hogwild' is none of the words of installed libraries; your own is module:name"
    ):
        find.find_extension("hogwild", VARIANTS, {})


def test_without_libraries_a_run_ends_well_and_what_they_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (find, shoal.runs.report):
        monkeypatch.setattr(module, "collect_extensions", lambda group: {})
    with shoal.runs.create("job", "", "one") as run:
        run.log(1, {"x": 1.0})
    shoal.runs.write_report_at_end("one")
    assert not caplog.records
    assert "tensorboard" not in said("runs one")
    with pytest.raises(RunError, match="no library writes the report of run one here"):
        shoal.runs.write_report(shoal.runs.load("one"))
    monkeypatch.setattr(shoal.plugins.lazy, "collect_extensions", lambda group: {})
    with pytest.raises(ImportError, match=r"cannot import name 'ImageFolder' from 'shoal.extend.data'"):
        exec("from shoal.extend.data import ImageFolder")
    file = tmp_path / "model.onnx"
    file.touch()
    refused = typed("models add", str(file)).exception
    assert isinstance(refused, ConfigError)
    assert (refused.field, refused.problem) == ("file", "is of no format that a library opens here")


def test_a_lazy_module_lists_its_names() -> None:
    names: dict[str, object] = {}
    exec("from shoal.extend import *", names)
    assert {"PeerSync", "Tracker", "RunFlow"} <= names.keys() & {*dir(shoal.extend)}
    assert "RunArguments" in dir(shoal.extend.cli)


def test_every_verb_of_our_libraries_is_there() -> None:
    assert {"plan", "find", "ablate"} <= find_commands().keys()
    for verb in find_commands():
        assert isinstance(cli.get_command(click.Context(cli), verb), click.Command)
    assert all(isinstance(each, Library) for each in find_libraries())
