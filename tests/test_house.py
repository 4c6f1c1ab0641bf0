"""What holds between the packages, and would break without a sound if nobody looked.

The packages are tested one by one, each where only its declared edges are installed. What no single package can see
stands here: that they are one version, that edges are declared and used and point down, that importing one starts
nothing, and that public names are complete.
"""

import ast
import dataclasses
import graphlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOME = Path(__file__).parents[1] / "packages"
PACKAGES = sorted(path.parent.name for path in HOME.glob("*/pyproject.toml"))
FLOORS = {
    "scale-core": 1,
    "scale-checkpoint": 2,
    "scale-fsdp": 2,
    "scale-oss": 2,
    "scale-tp": 2,
    "scale-moe": 2,
    "scale-adascale": 2,
    "scale-check": 2,
    "scale-snapshot": 2,
    "scale-pipe": 3,
    "scale-lightning": 3,
    "scale-fairscale": 4,
    "scale-train": 4,
    "scale-tools": 5,
}
FILES_OF_A_STEP = {
    "fully_shard": 12,
    "ShardedDataParallel": 12,
    "OSS with DDP": 7,
    "DistributedPipe": 12,
    "Pipe": 10,
    "parallelize": 12,
    "ColumnParallelLinear": 12,
    "AdaScale": 12,
    "checkpoint_wrapper": 3,
}
"""Of one steady step: how many files of ours it may enter. Jumps between them have no limit; the tool shows them."""
LINES_OF_A_STEP = {"fully_shard": 4350, "ShardedDataParallel": 4300}
"""Of one steady step: how many lines these files may have. FSDP2 of torch 2.13 has 4,653 in 6 files."""
NAMES_IN_A_TRACE = {
    "fully_shard": [
        f"scale_fsdp::{phase} (blocks.2)"
        for phase in ("all_gather", "wait_all_gather", "forward", "backward", "reduce_scatter", "wait_reduce_scatter")
    ],
    "ShardedDataParallel": [
        f"scale_oss::{phase} (bucket 0 of optimizer 0)"
        for phase in ("reduce_scatter", "wait_reduce_scatter", "all_gather", "wait_all_gather")
    ],
    "DistributedPipe": [
        "scale_pipe::forward (stage 0, micro-batch 3)",
        "scale_pipe::backward (stage 0, micro-batch 3)",
        "scale_pipe::wait_receive (gradient of stage 1 for stage 0, micro-batch 3)",
    ],
    "Pipe": ["scale_pipe::fetch (partition 1, micro-batch 3)", "scale_pipe::run (partition 1, micro-batch 3)"],
    "parallelize": ["scale_tp::all_reduce [8, 16]"],
    "ColumnParallelLinear": ["scale_tp::all_reduce [8, 4]"],
}
"""Of one step in a trace of torch.profiler, on rank 0: some names for each technique."""
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "misc", "helpers", "helper", "internal"}

each_package = pytest.mark.parametrize("package", PACKAGES)


@cache
def project(package: str) -> dict[str, Any]:
    """Returns the [project] table of a package."""
    table: dict[str, Any] = tomllib.loads((HOME / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


@cache
def source_folders(package: str) -> list[Path]:
    """Returns the folders that the wheel of a package installs, the one named first above the others."""
    text = (HOME / package / "pyproject.toml").read_text(encoding="utf-8")
    folders: list[str] = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [HOME / package / folder for folder in folders]


def import_name(distribution: str) -> str:
    """Returns the name that is imported: `scale_core` of `scale-core`, `fairscale` of `scale-fairscale`."""
    if distribution in PACKAGES:
        return source_folders(distribution)[0].name
    return {"pillow": "PIL"}.get(distribution, distribution.replace("-", "_"))


ALIASES = [package for package in PACKAGES if import_name(package) != package.replace("-", "_")]
"""Packages that install another project's names: what they offer is laid out and named as it is there."""


def sources(package: str) -> list[Path]:
    """Returns the source files of a package."""
    return sorted(path for folder in source_folders(package) for path in folder.rglob("*.py"))


def requirement_name(requirement: str) -> str:
    """Returns the distribution that a requirement names, without extras, version or marker."""
    return re.split(r"[\[<>=!~;\s]", requirement)[0]


def declared_edges(package: str) -> dict[str, str]:
    """Returns the requirements on our own packages, by distribution."""
    requirements: list[str] = project(package)["dependencies"]
    return {requirement_name(line): line for line in requirements if requirement_name(line) in PACKAGES}


def reachable(package: str) -> set[str]:
    """Returns the packages of ours that a package needs, directly or through others."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        new = set(declared_edges(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def imported_modules(package: str) -> set[str]:
    """Returns the top-level names that the sources import, at any depth of the code, without their own package."""
    found: set[str] = set()
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found - {folder.name for folder in source_folders(package)}


def module_name(path: Path) -> str:
    """Returns the dotted name of a source file."""
    parts = path.parts[path.parts.index("src") + 1 :]
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


@cache
def module_graph(package: str) -> dict[str, set[str]]:
    """Returns which modules of a package import which others of it, for types alone too; `__init__` files left out."""
    files = {module_name(path): path for path in sources(package) if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = imported & files.keys() - {name}
    return graph


def folder_graph(package: str) -> dict[str, set[str]]:
    """Returns which folders, and files beside them, import which others."""

    def place(module: str) -> str:
        return ".".join(module.split(".")[:2])

    graph: dict[str, set[str]] = {}
    for name, imported in module_graph(package).items():
        graph.setdefault(place(name), set()).update(place(other) for other in imported if place(other) != place(name))
    return graph


def assert_has_floors(graph: dict[str, set[str]]) -> None:
    """Checks that nothing in a graph comes back to itself; `CycleError` names what does."""
    graphlib.TopologicalSorter(graph).prepare()


def public_names(module: ModuleType) -> set[str]:
    """Returns what a module offers without an underscore, submodules and `from __future__` names left out.

    What is loaded when it is asked for counts as well.
    """
    return {
        name
        for name, value in ((name, getattr(module, name)) for name in dir(module))
        if not name.startswith("_") and not inspect.ismodule(value) and type(value).__module__ != "__future__"
    }


def test_every_package_has_its_floor() -> None:
    assert set(FLOORS) == set(PACKAGES)


def test_the_doctor_compares_the_versions_of_all_packages() -> None:
    assert sorted(importlib.import_module("scale_tools.doctor.environment").DISTRIBUTIONS) == PACKAGES


def test_all_packages_have_one_version() -> None:
    assert len({project(package)["version"] for package in PACKAGES}) == 1


@each_package
def test_a_package_says_its_version_when_imported(package: str) -> None:
    if package in ALIASES:
        pytest.skip("says the version of the project whose names it has")
    assert importlib.import_module(import_name(package)).__version__ == project(package)["version"]


@each_package
def test_a_package_is_complete(package: str) -> None:
    folder = HOME / package
    assert project(package)["name"] == package
    assert project(package)["requires-python"] == ">=3.11"
    assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {package}\n")
    assert all((installed / "py.typed").is_file() for installed in source_folders(package))
    assert (folder / "DESIGN.md").read_text(encoding="utf-8").startswith(f"# Design of {package}\n")
    assert list((folder / "tests").rglob("test_*.py"))
    assert (folder / "LICENSE").read_bytes() == (HOME.parent / "LICENSE").read_bytes()


ALIKE = ("authors", "license", "readme", "requires-python", "urls")
"""What the [project] tables of all packages have alike, those of them that have it."""
MATURITY = {"stable": "5 - Production/Stable", "beta": "4 - Beta", "alpha": "3 - Alpha"}
"""What the top README says of a package, and its classifier."""


@each_package
def test_what_an_index_shows_of_a_package_is_there_and_alike(package: str) -> None:
    table, first = project(package), project(PACKAGES[0])
    assert {name: table.get(name) for name in ALIKE} == {name: first.get(name) for name in ALIKE}
    assert table["authors"] == [{"name": "The scale authors"}]
    assert table["description"] and not table["description"].endswith(".")
    assert {"pytorch", "distributed training"} < set(table["keywords"])
    statuses, others = table["classifiers"][:1], table["classifiers"][1:]
    assert others == first["classifiers"][1:]
    row = re.search(rf"^\| \[{package}\].*$", (HOME.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row, f"README.md has no row of {package}"
    said = [f"Development Status :: {name}" for word, name in MATURITY.items() if f"| {word} |" in row.group()]
    assert said == statuses, f"README.md says {said} of {package}"
    (first_torch, next_torch) = re.findall(
        r"\d+\.(\d+)", next(line for line in table["dependencies"] if "torch" in line)
    )
    assert f"| 2.{first_torch} to 2.{int(next_torch) - 1} |" in row.group()


def test_the_citation_names_this_version() -> None:
    citation = (HOME.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project('scale-core')['version']}\n" in citation


@each_package
def test_the_top_readme_presents_the_package(package: str) -> None:
    assert f"packages/{package}" in (HOME.parent / "README.md").read_text(encoding="utf-8")


@each_package
def test_edges_name_exactly_our_version(package: str) -> None:
    for edge, requirement in declared_edges(package).items():
        version = project(edge)["version"]
        assert re.fullmatch(rf"{edge}(\[[\w,]+\])?=={re.escape(version)}", requirement), requirement


@each_package
def test_each_edge_is_declared_and_imported(package: str) -> None:
    ours = {import_name(name) for name in PACKAGES}
    declared = {import_name(edge) for edge in declared_edges(package)}
    assert declared == imported_modules(package) & ours


@each_package
def test_each_third_party_that_is_imported_is_declared(package: str) -> None:
    ours = {import_name(name) for name in PACKAGES}
    extras: dict[str, list[str]] = project(package).get("optional-dependencies", {})
    requirements = [*project(package)["dependencies"], *(line for lines in extras.values() for line in lines)]
    declared = {import_name(requirement_name(line)) for line in requirements}
    assert imported_modules(package) - ours - set(sys.stdlib_module_names) <= declared


def torch_range(package: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the oldest torch that a package asks for, and the first one that it does not take."""
    (line,) = (line for line in project(package)["dependencies"] if line.startswith("torch"))
    found = re.fullmatch(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", line)
    assert found is not None, line
    major, minor, major_end, minor_end = map(int, found.groups())
    return (major, minor), (major_end, minor_end)


@each_package
def test_a_package_takes_no_torch_that_its_edges_do_not_take(package: str) -> None:
    """Bounded on both sides: they reach for what torch may change in any release."""
    oldest, end = torch_range(package)
    assert end == torch_range("scale-core")[1]
    assert all(torch_range(edge)[0] <= oldest for edge in reachable(package))


@each_package
def test_links_of_a_readme_lead_somewhere_on_a_package_index_too(package: str) -> None:
    text = (HOME / package / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]*)\)|(?:href|src)=\"([^\"]*)\"", text):
        assert "".join(target).startswith(("https://", "#")), target


@each_package
def test_edges_point_down(package: str) -> None:
    assert all(FLOORS[edge] < FLOORS[package] for edge in declared_edges(package))


@each_package
def test_no_package_needs_itself_through_others(package: str) -> None:
    assert package not in reachable(package)


WITH_A_HOST = {"scale-lightning"}
"""Packages that import another framework, which imports what it likes."""
LATE_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "sympy",
)
"""What takes a second or more to import, and is needed by few programs, or only from the first step on."""
WATCHED_IMPORT = """
import sys, threading

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "socket.connect"}
started = []
sys.addaudithook(lambda event, arguments: started.append(event) if event in STARTS else None)
threading.Thread.start = lambda thread: started.append(thread)  # no audit event tells of threads before Python 3.12
__import__(sys.argv[1])
assert not started, started
if "torch" in sys.modules:
    import torch
    assert not torch.distributed.is_initialized()
    assert not torch.cuda.is_initialized()
print(*sorted({name.split(".")[0] for name in sys.modules if name.startswith(("scale_", sys.argv[1]))}))
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@each_package
def test_importing_a_package_loads_only_its_edges(package: str) -> None:
    name = import_name(package)
    run = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, name, *LATE_MODULES],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ours, late = (line.split() for line in run.stdout.splitlines())
    assert name in ours
    assert set(ours) <= {name, *map(import_name, reachable(package))}
    if package not in WITH_A_HOST:
        assert late == [], f"import {name} takes longer by these: import them in the function that needs them"


@each_package
def test_no_module_has_a_name_that_says_nothing(package: str) -> None:
    if package in ALIASES:
        pytest.skip("has the names of another project")
    root = HOME / package / "src"
    for path in sources(package):
        words = {part.strip("_") for part in path.relative_to(root).with_suffix("").parts}
        assert not words & NAMES_THAT_SAY_NOTHING, path


@each_package
def test_imports_inside_a_package_make_no_circle(package: str) -> None:
    assert_has_floors(module_graph(package))


@each_package
def test_folders_of_a_package_stand_on_each_other(package: str) -> None:
    assert_has_floors(folder_graph(package))


def test_a_step_passes_few_files() -> None:
    """`python tools/step_path.py fully_shard --calls` shows the way."""
    script = HOME.parent / "tools" / "step_path.py"
    traced = subprocess.run([sys.executable, script, *FILES_OF_A_STEP, "--json"], capture_output=True, check=True)
    for name, step in json.loads(traced.stdout).items():
        files = FILES_OF_A_STEP[name]
        assert step["files"] <= files, f"{name} passes {step['files']} files, and {files} are enough: {step['path']}"
        lines = LINES_OF_A_STEP.get(name)
        assert lines is None or step["lines"] <= lines, f"the files of {name} have {step['lines']} lines: {lines} do"


def test_a_trace_of_a_profiler_names_units() -> None:
    """`python tools/step_path.py --ranges` prints all names."""
    script = HOME.parent / "tools" / "step_path.py"
    command = [sys.executable, str(script), *NAMES_IN_A_TRACE, "--ranges"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    ranges = json.loads(printed.splitlines()[-1])  # The profiler may print lines of its own.
    for technique, names in NAMES_IN_A_TRACE.items():
        assert set(names) <= set(ranges[technique]), f"{technique} has {ranges[technique]}"


@pytest.mark.parametrize("script", ["architecture", "pictures", "figures"])
def test_what_a_tool_draws_or_writes_is_up_to_date(script: str) -> None:
    """`python tools/architecture.py` makes it again."""
    subprocess.run([sys.executable, HOME.parent / "tools" / f"{script}.py", "--check"], check=True)


def test_each_wait_between_streams_is_planted_or_explained() -> None:
    """`python tools/planted_races.py` shows which of them the race checker finds."""
    subprocess.run([sys.executable, HOME.parent / "tools" / "planted_races.py", "--check"], check=True)


@each_package
def test_each_folder_says_what_it_is_and_where_to_begin(package: str) -> None:
    for path in sources(package):
        if path.name == "__init__.py" and path.parent not in source_folders(package):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            assert "Begin with `" in doc and doc.count("\n") < 6, f"{path}: {doc}"


@each_package
def test_no_module_is_named_like_what_its_package_exports(package: str) -> None:
    """`from package import name` would give the one or the other, by what was imported before."""
    module = importlib.import_module(import_name(package))
    beside = {
        path.stem for path in (HOME / package / "src" / import_name(package)).iterdir() if path.suffix != ".typed"
    }
    assert not beside & (set(module.__all__) - {"__version__"})


def test_no_two_classes_have_one_name() -> None:
    """But for the packages of another project's names, which translate classes under the names that they have there."""
    owners: dict[str, Path] = {}
    for package in sorted(set(PACKAGES) - set(ALIASES)):
        for path in sources(package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    assert node.name not in owners, f"{node.name} in {path} and in {owners[node.name]}"
                    owners[node.name] = path


MOST_TABLES = 13
"""Limit for all packages: containers of modules and classes that functions fill."""
ALWAYS_FILLED = {"ContextVar", "Counter", "count", "local", "defaultdict", "deque"}
WEAK = re.compile("Weak[A-Za-z]*(Dictionary|Set)")
FILLING = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def filled_names(tree: ast.AST) -> set[str]:
    """Returns the names that a file's functions add items to; an attribute as `.name`."""
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLING:
                found.add("".join(ast.unparse(node.func.value).rpartition(".")[1:]))
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                found.add("".join(ast.unparse(node.value).rpartition(".")[1:]))
    return found


def process_tables(source: str) -> set[str]:
    """Returns the names of a file's tables: what a module or a class holds for the whole process."""
    tree = ast.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    filled, found = filled_names(tree), set()
    for owner in owners:
        for node in owner.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(targets[0], ast.Name):
                continue
            name, made_by = targets[0].id, ""
            places = {f".{name}"} if isinstance(owner, ast.ClassDef) else {name, f".{name}"}
            if isinstance(value, ast.Call):
                function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
                made_by = ast.unparse(function).rpartition(".")[2]
            is_literal = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            is_container = is_literal or made_by in {"dict", "list", "set", "OrderedDict"}
            if made_by in ALWAYS_FILLED or WEAK.fullmatch(made_by) or (is_container and filled & places):
                found.add(name)
    return found


def test_tables_of_a_process_are_found() -> None:
    source = """
filled = {}
constant = {1: 2}
also_filled: list[int] = []
weak: WeakKeyDictionary[int, int] = WeakKeyDictionary()
numbers = Counter[int]()
class Model:
    of_class: dict[int, int] = {}
    argument = {}
def function(argument):
    filled[1] = constant[1]
    also_filled.append(2)
    Model.of_class.setdefault(1, 2)
    argument[1] = 2
"""
    assert process_tables(source) == {"filled", "also_filled", "weak", "numbers", "of_class"}


def test_one_page_lists_all_tables_of_a_process() -> None:
    found = {"scale_core.hooks.gradients.gradient_hooks"}  # It has its tables as attributes.
    for package in PACKAGES:
        for path in (HOME / package / "src").rglob("*.py"):
            module = ".".join(path.relative_to(HOME / package / "src").with_suffix("").parts)
            found |= {f"{module}.{name}" for name in process_tables(path.read_text(encoding="utf-8"))}
    page = (HOME.parent / "docs" / "how-the-core-works.md").read_text(encoding="utf-8")
    section = page.partition("## What a process keeps")[2].partition("\n## ")[0]
    assert found == set(re.findall(r"^\| `(scale_[\w.]+|fairscale[\w.]+)` \|", section, re.MULTILINE))
    assert len(found) <= MOST_TABLES


@each_package
def test_public_names_are_complete(package: str) -> None:
    module = importlib.import_module(import_name(package))
    listed: list[str] = module.__all__
    assert len(listed) == len(set(listed))
    assert set(listed) == public_names(module)


@each_package
def test_public_names_live_where_they_are_imported_from(package: str) -> None:
    """So that tracebacks and documentation show the path that people write; some are of a package below, or torch's."""
    module = importlib.import_module(import_name(package))
    homes = {module.__name__, *map(import_name, reachable(package)), "torch.distributed.fsdp"}
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ in homes, f"{name} says that it lives in {value.__module__}"


STATE_DICTS = {
    *("state_dict", "load_state_dict"),  # as of torch: whole, or of this rank where an optimizer steps on shards
    *("full_state_dict", "load_full_state_dict"),  # full tensors
    *("full_optim_state_dict", "shard_optim_state_dict"),  # the same of an optimizer, and what a rank takes of it
    *("sharded_state_dict", "load_sharded_state_dict", "target_state_dict"),  # each rank its part, for files
    *("local_state_dict", "load_local_state_dict"),  # this rank's shard alone
    "consolidate_local_state_dicts",  # of those of all ranks, the whole one
    "consolidate_state_dict",  # as of torch's ZeroRedundancyOptimizer
}
"""What functions that give or take a state are called in all packages."""


@each_package
def test_one_thing_has_one_name_in_all_packages(package: str) -> None:
    """Ranks are given as `process_group=` or as a mesh, as torch's wrappers are, and each wait has `limit_seconds=`.

    Functions of scale_core that carry out one operation take `group`, as those of torch.distributed do. What clips is
    `clip_grad_norm_`, and what has a state `STATE_DICTS` say.
    """
    homes = [path for path in sources(package) if path.name == "__init__.py" and "__all__" in path.read_text("utf-8")]
    modules, wrong = [importlib.import_module(module_name(path)) for path in homes], []
    offered = {id(value): value for module in modules for value in (getattr(module, n) for n in public_names(module))}
    for of_it in offered.values():
        members = [of_it, *(vars(of_it).values() if isinstance(of_it, type) else ())]
        bases = of_it.__mro__ if isinstance(of_it, type) else ()
        given = {name for base in bases if not base.__module__.startswith("scale_") for name in vars(base)} - {
            "__init__"
        }
        for function in filter(inspect.isfunction, members):
            name = function.__name__
            public = name == "__init__" or not name.startswith("_")
            if name in given or not public or not function.__module__.startswith("scale_"):
                continue
            if "clip" in name and "norm" in name and name != "clip_grad_norm_":
                wrong.append(f"{function.__qualname__}, for clip_grad_norm_")
            if "state_dict" in name and not name.startswith("register") and name not in STATE_DICTS:
                wrong.append(f"{function.__qualname__}, for one of STATE_DICTS")
            for parameter in inspect.signature(function).parameters.values():
                if name == "__init__" and dataclasses.is_dataclass(of_it):  # Fields are no arguments of a call.
                    continue
                ranks = "GroupLike" in str(parameter.annotation) or parameter.annotation == "Group | None"
                named_well = parameter.name.endswith(("process_group", "mesh", "_parallel_group"))
                if (ranks and not named_well) or parameter.name in ("timeout", "timeout_seconds"):
                    wrong.append(f"{function.__qualname__}({parameter.name}=)")
    assert wrong == []


FAIRSCALES_SPELLINGS = {
    *("gather_full_optim_state_dict", "get_shard_from_optim_state_dict"),  # full_optim_state_dict and shard_...
    *("local_metadata_dict", "consolidate_shard_weights"),  # consolidate_local_state_dicts
    *("default_auto_wrap_policy", "config_auto_wrap_policy"),  # size_policy, name_policy
    *("unwrapped_params", "module_is_root"),  # nonwrapped_numel
    *("FSDPConfig", "with_wrapped_modules", "auto_wrap_bn", "shard_as_fairscale"),  # fully_shard_modules, fully_shard
    *("clip_grad_norm", "refresh_trainable"),  # clip_grad_norm_
    *("broadcast_buffer_size", "force_broadcast_object", "reduce_buffer_size"),  # bucket_numel
    *("auto_refresh_trainable", "warn_on_trainable_params_changed"),
    "sync_models_at_startup",  # sync_module_states
    *("model_parallel_size_", "pipeline_length"),  # tensor_model_parallel_size, pipeline_model_parallel_size
    *(f"get_model_parallel_{what}" for what in ("group", "rank", "src_rank", "world_size")),  # get_tensor_model_...
    *("get_pipeline_parallel_group", "get_pipeline_parallel_ranks"),  # get_pipeline_model_parallel_...
    *(f"{what}_model_parallel_region" for what in ("copy_to", "gather_from", "reduce_from", "scatter_to")),
    "divide_and_check_no_remainder",  # divide
}
"""What FairScale calls what has the field's name in the packages: in the alias, and nowhere else."""


def test_old_spellings_of_fairscale_live_in_the_alias_alone() -> None:
    """None is the name of a function, a class, a parameter or a variable, or is imported."""
    for package in sorted(set(PACKAGES) - set(ALIASES)):
        for path in sources(package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
                assert name not in FAIRSCALES_SPELLINGS, f"{path}:{getattr(node, 'lineno', 0)} has {name}"


def test_test_files_have_names_of_their_own() -> None:
    """Without `__init__.py` beside them, two test files of one name cannot be run together."""
    names = [path.name for folder in (HOME, HOME.parent / "tests") for path in folder.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
