"""The rules of the house, by walking the imports: who may import ray and torch, and that imports point down."""

import ast
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from python_program import run_python
from shoal.plugins.library import find_libraries

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import the rooms below it. Rooms on one line do not import each other.
LEVELS = [
    {"__main__"},
    {"libs"},
    {"extend"},
    {"testing"},
    {"cli", "api"},
    {"flows", "loaded"},
    {"train", "rl", "serve"},
    {"cluster"},
    {"actor", "client"},
    {"cost", "sync"},
    {"checkpoint", "parallel", "data", "models"},
    {"runs", "registry", "search"},
    {"batching", "weights"},
    {"open_inference", "sources"},
    {"wire"},
    {"config", "store"},
    {"channel", "home", "yaml_text"},
    {"frame", "plugins"},
    {
        *("errors", "gc_freeze", "batch_tree", "atomic_file", "network_address", "cpu_count", "random_state"),
        *("recipes", "ray_call", "differentiation", "device_memory"),
    },
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def import_statements_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Also those inside functions and for type checking."""
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def imports_of(path: Path) -> set[str]:
    """Every module that a file imports."""
    names: set[str] = set()
    for node in import_statements_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_platform_is_a_folder_and_never_a_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()  # it would hide the standard library's platform


def test_imports_point_down() -> None:
    """A room that is not in LEVELS fails here too."""
    wrong = [
        f"{path.relative_to(PACKAGE)} may not import {name}"
        for path in FILES
        if (room := room_of(path)) != "__init__"
        for name in sorted(imports_of(path))
        if name.startswith("shoal.") and (there := name.split(".")[1]) in LEVEL and there != room
        if LEVEL[there] <= LEVEL[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_library_imports_those_that_it_needs() -> None:
    needs = {each.name: {each.name, *each.needs} for each in find_libraries()}
    wrong = [
        f"{path.relative_to(PACKAGE)} may not import {name}"
        for path in FILES
        if room_of(path) == "libs"
        for name in sorted(imports_of(path))
        if name.startswith("shoal.libs.")
        and name.split(".")[2] not in needs.get(own := path.relative_to(PACKAGE / "libs").parts[0], {own})
    ]
    assert not wrong, "\n".join(wrong)


def test_one_module_draws_curves_with_matplotlib() -> None:
    """So a run looks the same wherever it is drawn; a library hands over `Panel`s. The other one draws photographs."""
    drawing = {path for path in FILES if any(name.startswith("matplotlib.") for name in imports_of(path))}
    assert drawing == {PACKAGE / "runs" / "figures.py", PACKAGE / "libs" / "segmentation" / "comparison.py"}


def test_one_module_counts_what_is_shown() -> None:
    """Who reads a group of metrics on its own may leave out what others show."""
    shown = [*PACKAGE.glob("cli/**/*.py"), *PACKAGE.glob("libs/console/**/*.py"), *PACKAGE.glob("libs/console/**/*.js")]
    groups = ("actor_lag/", "drops/", "rejected/", "win_rate/")
    assert [path for path in shown if any(group in path.read_text() for group in groups)] == []


def test_only_runs_asks_the_record() -> None:
    """Its SQL is in `runs`: elsewhere is that of other databases, the ledger's and of what people write about runs."""
    libraries = PACKAGE / "libs"
    others = {
        libraries / "console" / "notes.py",
        libraries / "agents" / "sessions" / "store.py",
        *PACKAGE.glob("rl/experience/*.py"),
    }
    asking = [
        f"{path.relative_to(PACKAGE)} asks {node.value!r}"
        for path in FILES
        if room_of(path) != "runs" and path not in others
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("SELECT ")
    ]
    assert not asking, "\n".join(asking)


def test_only_shells_and_the_cluster_import_ray() -> None:
    shells = {path for path in FILES if path.name.startswith("ray_") or path.parent.name == "on_ray"}
    others = [path for path in FILES if path not in shells and room_of(path) != "cluster"]
    importing = [path for path in others if any(name.partition(".")[0] == "ray" for name in imports_of(path))]
    assert not importing, "\n".join(map(str, importing))


# Within a room: its folders, and where their order needs it the files beside them, from the top down. One line does not
# import each other. "." stands for the files that are not named.
ORDER: dict[str, list[set[str]]] = {
    "cli": [{"."}, {"commands"}, {"display"}, {"support"}],
    "train": [{"__main__"}, {"launch"}, {"export", "loop"}, {"optim", "reporting"}, {"."}],
    "rl": [
        {"local_loop", "ray_workers"},
        {"first_game", "restart_limit"},
        {"learner", "learner_replica"},
        {"batch_checks", "batch_lease", "pausable_loop", "published_versions"},
        {"gateway", "algorithms"},
        {"learner_group"},
        {"experience"},
        {"spec"},
        {"algorithm_config", "part_specs", "policy_graph"},
    ],
    "serve": [
        {"on_ray"},
        {"replica"},
        {"http"},
        {"controller", "model", "protocol", "scaling"},
        {"messages"},
        {"spec"},
    ],
}


@pytest.mark.parametrize("room", ORDER)
def test_folders_of_a_room_import_down(room: str) -> None:
    level = {name: number for number, names in enumerate(ORDER[room]) for name in names}

    def part_of(name: str) -> str:
        return name if name in level else "."

    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(PACKAGE / room).with_suffix("").parts
        if parts == ("__init__",):
            continue
        here = part_of(parts[0])
        for name in imports_of(path):
            imported = name.split(".")
            if imported[:2] == ["shoal", room] and len(imported) > 2:
                there = part_of(imported[2])
                is_allowed = there == here or level.get(there, -1) > level.get(here, -1)
                assert is_allowed, f"{path.relative_to(PACKAGE)} may not import {name}"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def circles_in(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected components of more than one node; Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                circles.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


def imported_modules(path: Path) -> set[str]:
    """The modules of ours that a file imports: `from shoal.data import loader` imports the module, not its package."""
    modules = set()
    for node in import_statements_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= (members & MODULES.keys()) | ({node.module} if members - MODULES.keys() else set())
    return modules & MODULES.keys()


def test_no_circle_between_modules() -> None:
    assert not circles_in({module: imported_modules(path) - {module} for module, path in MODULES.items()})


def test_a_circle_is_found() -> None:
    assert circles_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


# What one module alone may import: its mechanism has one place.
ONE_IMPORTER = {
    "torch.testing._internal.distributed.fake_pg": "libs/planning/predict/fake_process_group.py",
    "shoal.libs.planning.predict.fake_process_group.fake_world": "libs/planning/predict/rank_step.py",
    "shoal.extend.cost.profile_step": "libs/planning/predict/rank_step.py",
}


def test_a_mechanism_has_one_place() -> None:
    for name, place in ONE_IMPORTER.items():
        assert [path for path in FILES if name in imports_of(path)] == [PACKAGE / place]


def test_folders_hold_at_most_fifteen_files() -> None:
    sizes: dict[Path, int] = {}
    for path in FILES:
        if path.name != "__init__.py":
            sizes[path.parent] = sizes.get(path.parent, 0) + 1
    assert {str(folder): size for folder, size in sizes.items() if size > 15} == {}


def test_jobs_and_serve_apps_are_imported_by_nobody() -> None:
    for path in FILES:
        assert not {name for name in imports_of(path) if name.partition(".")[0] in ("jobs", "serve_apps")}


LOADED_BY = """
import importlib, json, runpy, sys
found = {}
for heavy, names in json.loads(sys.argv[1]):
    for name in names:
        runpy.run_path(name) if name.endswith('.py') else importlib.import_module(name)
        if loaded := [each for each in heavy if each in sys.modules]:
            found[name] = loaded
print(json.dumps(found))
"""


def loaded_by(*groups: tuple[Sequence[str], Sequence[str]]) -> dict[str, list[str]]:
    """Which of the first names, the heavy ones, are loaded when a fresh process has imported the second, modules or
    files, one after the other: where none is, no module of them loads one by itself."""
    found: dict[str, list[str]] = json.loads(run_python(LOADED_BY, json.dumps(groups), cwd=ROOT))
    return found


# Neither torch nor Ray nor the platform's libraries.
GAME_CLIENT = (
    ["torch", "ray", "pydantic", "pandas", "click", "rich", "yaml"],
    ["shoal", "shoal.wire", "shoal.actor", "shoal.weights", "shoal.home"],
)
ENDPOINT_CLIENT = (
    ["torch", "ray", "pydantic", "pandas", "pyarrow", "yaml", "shoal.runs", "shoal.serve"],
    ["shoal.client"],
)
# Gateway, weight store, mailbox, endpoint controller, and drivers: two seconds of a core and 200 MB each, for nothing.
COMPUTES_NOTHING = (
    ["torch", "shoal.flows"],
    [
        "shoal.rl.ray_workers",
        "shoal.weights.ray_weight_store",
        "shoal.runs.ray_event_channel",
        "shoal.serve.on_ray.deployment",
    ],
)
# Words are checked before what only a run needs is loaded: a user who mistypes one waits for this, and so does every
# run that starts its own cluster.
PROGRAMS = (
    ["torch", "ray.serve"],
    ["jobs/actor_learner.py", "serve_apps/live_policy.py", "serve_apps/registered_model.py"],
)
TRAINING = (["ray.train", "ray.serve", "torch.distributed.tensor", "sympy"], ["jobs/train.py"])
# A run has a dozen processes: a second of imports in each of them is what a user waits for at its start.
LOOP = (
    ["torch.distributed.checkpoint", "sympy", "matplotlib", "opentelemetry", "shoal.train", "shoal.data"],
    ["shoal.rl.learner", "shoal.serve.replica.replica", "shoal.registry"],
)


@pytest.mark.parametrize("groups", [[GAME_CLIENT, ENDPOINT_CLIENT, COMPUTES_NOTHING], [PROGRAMS, LOOP, TRAINING]])
def test_a_process_loads_only_what_it_needs(groups: list[tuple[list[str], list[str]]]) -> None:
    """In an order in which no group loads what a later one must be without."""
    assert loaded_by(*groups) == {}


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in FILES if not ast.get_docstring(parse(path))]
    assert not silent, "\n".join(map(str, silent))


def test_steps_become_segments_at_an_actor_and_at_the_gateway_and_nowhere_else() -> None:
    """Each in one place: an episode of one agent and those of many are the same rows, whoever sends them."""
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Segment"
    }
    read = {"wire/segment.py", "libs/demonstrations/files.py"}
    texts = "libs/agents/sessions/groups.py"  # whose steps are tokens
    random = "libs/bench/gateway.py"  # of no steps
    assert makers - read == {"actor/segment_builder.py", "rl/gateway/remote_episodes.py", texts, random}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if "shoal.rl.gateway.remote_episodes" in imported_modules(path)
    }
    assert users == {"rl/gateway/remote_inference.py", "rl/gateway/user_episodes.py"}
