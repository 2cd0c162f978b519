"""Fixtures for every test: a home of its own, no Ray in tests/unit, one shared cluster for those that need Ray."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

import suite
from libraries import find_missing_libraries
from session_end import at_session_end

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shoal.cluster.embedded_cluster import EmbeddedCluster

# Ray reads this when it is imported, which a test module may do before any fixture runs: 127.0.0.1 stays 127.0.0.1.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"  # as every cluster here has it
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets: what is piped is as wide as its cells
os.environ["SHOAL_LOG_MONITOR"] = "0"  # no test reads what workers print
os.environ["SHOAL_VERIFY"] = "0"  # a test that needs it asks for it: each takes a second start of torch
if "PYTEST_XDIST_WORKER" in os.environ:  # several of us share the cores; torch reads this when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A suite started in the background ignores SIGINT, and so would every program that its tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile("shoal", deadline=None, max_examples=40)  # others come with every run
hypothesis.settings.load_profile("shoal")

TESTS = Path(__file__).parent
_homes = itertools.count()
WITH_CLUSTER = ("ray", "faults", "e2e", "hosts")
WITHOUT_RAY = ("unit", "loop", "training", "equivalence", "serving", "libs")

# Of these folders each test goes to whichever process is free, since they have a cluster there anyway; in all other
# folders, and where a file says scope="module", tests of one file share what is dear: an endpoint, a run, hosts.
APART = ("ray", "faults", "e2e")

# Ray's own warnings, which are not ours to mend: `filterwarnings = error` stays for everything else.
RAYS_OWN = (
    "ignore:Tip. In future versions of Ray, Ray will no longer override accelerator:FutureWarning",
    # Ray leaves its pipes and sockets to the garbage collector at shutdown.
    "ignore:unclosed.*:ResourceWarning:ray",
    # Ray Train asks Ray Data for its context, which sets options that it has itself deprecated.
    "ignore::DeprecationWarning:ray.data.context",
)


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


class _NoRay(MetaPathFinder):
    """Refuses to find ray."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "ray":
            raise ImportError(
                f"tests of {', '.join(WITHOUT_RAY)} may not import {fullname}: move the test to tests/ray"
            )
        return None


@contextmanager
def _ray_forbidden() -> Iterator[None]:
    """Make every import of ray fail, also of what another test has imported before."""
    hidden = {}
    if "ray" in sys.modules:
        hidden = {name: module for name, module in sys.modules.copy().items() if name.partition(".")[0] == "ray"}
    for name in hidden:
        del sys.modules[name]
    finder = _NoRay()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(hidden)


def pytest_configure(config: pytest.Config) -> None:
    """The whole suite ends by saying where its time went."""
    if suite.DURATIONS in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(suite.Durations(Path(os.environ[suite.DURATIONS])))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of a library that has been deleted are not collected."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and find_missing_libraries(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that use Ray hear its own warnings without failing."""
    for item in items:
        if _folder(item.path) in WITH_CLUSTER:
            for rule in RAYS_OWN:
                item.add_marker(pytest.mark.filterwarnings(rule))


def pytest_collection_finish() -> None:
    """No collection looks through what has been loaded by now, here or in what is forked from here."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """What lasts as long as the session ends with it."""
    at_session_end.close()


class _Together(LoadScopeScheduling):
    """`--dist loadgroup`, by file: xdist 3.8 does not find its own marks under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = Path(file).parent.name
        if folder == "hosts":  # each starts several Rays: one after the other
            return folder
        return nodeid if folder in APART and not _shares(file) else file


@functools.cache
def _shares(file: str) -> bool:
    return 'scope="module"' in (TESTS.parent / file).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Together | None:
    return _Together(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Ray is forbidden to the module level of unit tests too."""
    if isinstance(collector, pytest.Module) and _folder(collector.path) in WITHOUT_RAY:
        with _ray_forbidden():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test may be skipped for want of a GPU, and for nothing else. One that failed shows what may tell why."""
    report = yield
    if report.failed:
        from shoal_program import last_words

        report.sections += last_words()
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("gpu") is not None
    if report.skipped and "CI" in os.environ and not expected:
        reason = call.excinfo.value if call.excinfo else ""
        report.outcome, report.longrepr = "failed", f"skipped ({reason}), as only tests marked gpu may be in CI"
    return report


@pytest.fixture(autouse=True)
def _no_ray_without_a_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    if _folder(request.path) not in WITHOUT_RAY:
        yield
        return
    with _ray_forbidden():
        yield


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The $SHOAL_HOME of the tests that share the cluster."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def shoal_home(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """$SHOAL_HOME: a folder of its own per test, which nobody has made yet; one for all that may use the cluster."""
    if _folder(request.path) in WITH_CLUSTER:
        folder: Path = request.getfixturevalue("shared_home")
    else:
        folder = tmp_path_factory.getbasetemp() / f"home-{next(_homes)}"
    monkeypatch.setenv("SHOAL_HOME", str(folder))
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    return folder


@pytest.fixture(scope="session")
def cluster(shared_home: Path) -> Iterator[EmbeddedCluster]:
    """One cluster for the whole session, with this process attached to it; at the end nothing of it is left."""
    from leftovers import assert_nothing_left, listening_ports
    from shoal.cluster.embedded_cluster import start_cluster
    from shoal_program import logs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(shared_home))
        with start_cluster(num_cpus=8) as started:
            assert started.temp_dir is not None
            patch.setitem(logs, "the cluster", started.temp_dir / "head.log")
            for name, value in started.environment.items():
                patch.setenv(name, value)
            import ray

            ray.init(log_to_driver=False)
            yield started
            ray.shutdown()
            ports = listening_ports(started.pids())
        assert_nothing_left(started, ports)


@pytest.fixture
def group_of_one() -> Iterator[ProcessGroup]:
    """This process is all of a group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch: threads that wait for each other take most of the time of small networks, and sums have one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
