"""Every code block and every install line of the guides and READMEs.

A ```python block with `>>>` is a doctest and is run, page by page. Any other one that defines all the names that it
uses is run as a program, on as many ranks as a comment before it says: `<!-- ranks: 2 -->`. What can not be run here
has a comment that says why: `<!-- not run: needs two GPUs -->`. The rest are parts of programs: they are compiled, what
they import of ours must exist, and calls of ours must be given arguments that there are. Running takes `nox -s
examples`, resolving install lines `nox -s build`; the other checks are a part of `nox -s house`. Each test prints how
many blocks it has seen to, and how.
"""

import ast
import builtins
import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HOUSE = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(HOUSE).as_posix()
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/guides/**/*.md",
        "docs/internals/*.md",
        "docs/examples/*.md",
        "docs/tutorials/*.md",
        "packages/*/README.md",
    )
    for path in HOUSE.glob(pattern)
)
FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})[ ]*\{?[ .]*(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"<!--\s*(?:ranks:\s*(?P<ranks>\d+)|not run:\s*(?P<reason>[^>]*?))\s*-->\s*\Z")
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@dataclass(frozen=True)
class Block:
    """A ```python block of a page, and what the comment before it says."""

    page: str
    line: int
    code: str
    ranks: int | None
    reason: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_doctest(self) -> bool:
        return ">>>" in self.code

    @property
    def is_included(self) -> bool:
        """Is a file that the site puts in here; the files have tests of their own."""
        return self.code.startswith("--8<--")


@cache
def blocks_of(page: str) -> list[Block]:
    """Returns the blocks of a page, in order."""
    text, blocks = (HOUSE / page).read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        if fence["language"] == "python":
            before, line = text[: fence.start()], text.count("\n", 0, fence.start("body")) + 1
            comment = COMMENT.search(before)
            ranks, reason = (comment["ranks"], comment["reason"]) if comment else (None, None)
            code = textwrap.dedent(fence["body"])
            blocks.append(Block(page, line, code, int(ranks) if ranks else None, reason))
    return blocks


def all_blocks() -> list[Block]:
    """Returns the blocks of all pages but those that include a file."""
    return [block for page in PAGES for block in blocks_of(page) if not block.is_included]


def undefined_names(tree: ast.AST) -> list[str]:
    """Returns the names that a program uses and nothing in it defines."""
    used: set[str] = set()
    defined = set(dir(builtins)) | {"__name__", "__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    has_gap = any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree))
    return sorted(used - defined) + ["..."] * has_gap


def missing_libraries(tree: ast.AST) -> list[str]:
    """Returns what a program imports and is not installed here."""
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    return sorted(name for name in {module.split(".")[0] for module in modules} if find_spec(name) is None)


def is_run(block: Block) -> bool:
    """Whether a block that is no doctest is run as a program."""
    return block.reason is None and not block.is_doctest and not undefined_names(ast.parse(block.code))


@cache
def our_packages() -> dict[str, str]:
    """Returns the names that are imported, and the distributions that bring them."""
    return {
        path.name: folder.name
        for folder in HOUSE.glob("packages/scale-*")
        for path in (folder / "src").iterdir()
        if (path / "__init__.py").is_file()
    }


@cache
def our_public_names() -> dict[str, Any]:
    """Returns what our packages export, by its name; what two of them export is left out."""
    found: dict[str, list[Any]] = {}
    for name in our_packages():
        if name.startswith("scale_"):
            module = importlib.import_module(name)
            for public in module.__all__:
                found.setdefault(public, []).append(getattr(module, public))
    return {name: values[0] for name, values in found.items() if len({id(value) for value in values}) == 1}


def check_names(block: Block) -> list[str]:
    """Returns what a block imports of ours that is not there, and arguments that a call of ours does not have.

    A module of ours that stands on a library which is not installed here is passed over.
    """
    tree, imported = ast.parse(block.code), dict[str, Any]()
    wrong: list[str] = []
    for node in ast.walk(tree):
        names: list[tuple[str, str, str]] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in our_packages():
            names = [(node.module, alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [
                (each.name, "", each.asname or each.name)
                for each in node.names
                if each.name.split(".")[0] in our_packages()
            ]
        for module, name, known_as in names:
            try:
                value = importlib.import_module(module)
                imported[known_as] = getattr(value, name) if name else value
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] in our_packages():
                    wrong.append(f"{block.where}: {error}")
            except AttributeError:
                try:
                    importlib.import_module(f"{module}.{name}")
                except ImportError:
                    wrong.append(f"{block.where}: {module} has no {name}")
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        function: Any = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in our_packages():
            if not hasattr(module_of := importlib.import_module(node.value.id), node.attr):
                wrong.append(f"{block.where}: {node.value.id} has no {node.attr}")
            function = getattr(module_of, node.attr, None)
        elif isinstance(node, ast.Name) and node.id not in stored:
            function = imported.get(node.id, our_public_names().get(node.id))
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and each.func is node]
        if function is None or not callable(function) or not calls:
            continue
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
            wrong += [f"{block.where}: {ast.unparse(node)} has no argument {name}" for name in given - set(parameters)]
    return wrong


def test_every_block_compiles_and_names_what_there_is() -> None:
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    for block in all_blocks():
        if block.is_doctest:
            seen["are doctests, which `nox -s examples` runs"] += 1
            continue
        try:
            tree = ast.parse(block.code)
        except SyntaxError as error:
            wrong.append(f"{block.where}: {error}")
            continue
        wrong += check_names(block)
        if is_run(block):
            seen["are whole programs, which `nox -s examples` runs"] += 1
        elif block.reason is not None:
            seen[f"are compiled only: {block.reason}"] += 1
        else:
            seen["are compiled only: parts of programs"] += 1
            print(f"{block.where} is a part of a program: it uses {', '.join(undefined_names(tree))}")
    print("\n".join(f"{count} blocks {what}" for what, count in seen.items()))
    assert wrong == []
    assert seen["are doctests, which `nox -s examples` runs"] > 50, "the pages were not found"


@pytest.mark.parametrize(
    "code, said",
    [
        ("from scale_fsdp import full_shard", "scale_fsdp has no full_shard"),
        ("import scale_fsdp.nothing", "No module named 'scale_fsdp.nothing'"),
        ("import scale_tp\nscale_tp.parallel(model)", "scale_tp has no parallel"),
        ("from scale_fsdp import fully_shard\nfully_shard(model, devices=2)", "fully_shard has no argument devices"),
        ("fully_shard(model, devices=2)", "fully_shard has no argument devices"),
    ],
)
def test_names_that_are_not_there_are_found(code: str, said: str) -> None:
    (wrong,) = check_names(Block("page", 1, code, None, None))
    assert wrong == f"page:1: {said}"


def run_doctests(page: str) -> tuple[int, str]:
    """Runs the doctests of a page, which share their names; returns how many examples, and what failed."""
    text, lines = (HOUSE / page).read_text(encoding="utf-8"), []
    starts = {block.line: block for block in blocks_of(page) if block.is_doctest and block.reason is None}
    for line in range(1, text.count("\n") + 2):
        if line in starts:
            lines += [*starts[line].code.splitlines(), ""]
        elif len(lines) < line:
            lines.append("")
    test = doctest.DocTestParser().get_doctest("\n".join(lines), {"__name__": "__main__"}, page, page, 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    return result.attempted, "".join(said) if result.failed else ""


def run_program(code: str, where: str) -> None:
    """Runs a block as a program."""
    exec(compile(code, where, "exec"), {"__name__": "__main__"})


DOCTESTS = [page for page in PAGES if any(block.is_doctest for block in blocks_of(page))]
PROGRAMS = [block for block in all_blocks() if is_run(block)]


@pytest.mark.soak
@pytest.mark.parametrize("page", DOCTESTS)
def test_doctests_of_a_page_pass(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scale_core.testing import run_ranks

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((attempted, failed),) = run_ranks(run_doctests, 1, page, backend=None)
    print(f"{page}: {attempted} examples")
    assert attempted and not failed, failed


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX:UserWarning")  # of lightning
@pytest.mark.filterwarnings("ignore:The .srun. command is available:UserWarning")  # of lightning, beside SLURM
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.where)
def test_a_program_of_a_page_runs(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scale_core.testing import run_ranks

    if missing := missing_libraries(ast.parse(block.code)):
        pytest.skip(f"{block.where} needs {', '.join(missing)}, not installed here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_ranks(run_program, block.ranks or 1, block.code, block.where, backend="gloo" if block.ranks else None)


# Install lines.


@cache
def project(package: str) -> dict[str, Any]:
    """Returns the pyproject.toml of a package."""
    return tomllib.loads((HOUSE / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    """Returns the distribution or the folder that a requirement names."""
    return re.split(r"[\[<>=!~; ]", requirement)[0]


@cache
def needed(package: str) -> frozenset[str]:
    """Returns the packages of ours that a package needs, also through others."""
    ours = set(our_packages().values())
    edges = {name_of(line) for line in project(package)["project"]["dependencies"]} & ours
    return frozenset(edges.union(*map(needed, edges)))


@cache
def third_parties() -> frozenset[str]:
    """Returns the distributions of others that some pyproject or the noxfile names."""
    names = {"nox", "torch"}
    for package in our_packages().values():
        table = project(package)
        lines = list(table["project"]["dependencies"])
        for group in (table["project"].get("optional-dependencies", {}), table.get("dependency-groups", {})):
            lines += [line for each in group.values() for line in each]
        names |= {name_of(line) for line in lines}
    quoted = re.findall(r'"([\w.-]+)(?:\[\w+\])?[<>=]=[^"]*"', (HOUSE / "noxfile.py").read_text(encoding="utf-8"))
    return frozenset(names | set(quoted))


def install_lines(page: str) -> list[tuple[str, list[str]]]:
    """Returns where a page installs something, and the requirements there; lists of packages in tables, too."""
    text, found = (HOUSE / page).read_text(encoding="utf-8"), []
    for match in re.finditer(r"(?:pip install\b((?:\\\n|[^`\n])*))|`([\"']?\./packages/scale-[^`\n]*)`", text):
        command = (match[1] or match[2] or "").replace("\\\n", " ").split("&&")[0]
        if "pip install" in command:
            continue  # in backticks: the other alternative has it
        words = shlex.split(command, comments=True)
        takes_a_word = {"--find-links", "--extra-index-url", "--index-url", "-f"}
        kept = [word for before, word in zip(["", *words], words, strict=False) if before not in takes_a_word]
        where = f"{page}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append((where, [word for word in kept if not word.startswith("-")]))
    return found


def test_every_install_line_names_all_that_it_needs() -> None:
    wrong: list[str] = []
    num_lines = 0
    for page in PAGES:
        for where, requirements in install_lines(page):
            num_lines += bool(requirements)
            local = set()
            for requirement in requirements:
                path, name = requirement.startswith("./"), name_of(requirement).removeprefix("./packages/")
                if not path and "/" not in name and name in third_parties():
                    continue
                if name not in our_packages().values() or (path and not (HOUSE / name_of(requirement)).is_dir()):
                    wrong.append(f"{where}: there is no {requirement}")
                    continue
                extras = re.findall(r"\w+", requirement.partition("[")[2].partition("]")[0])
                known = project(name)["project"].get("optional-dependencies", {})
                wrong += [f"{where}: {name} has no extra {extra}" for extra in extras if extra not in known]
                local |= {name} if path else set()
            # The packages are not published, so that pip finds what they need in the same line or nowhere.
            for name in sorted(set().union(*map(needed, local)) - local) if local - {"scale-core"} else []:
                wrong.append(f"{where}: {name} is missing, which {' or '.join(sorted(local))} needs")
    print(f"{num_lines} install lines")
    assert wrong == []
    assert num_lines > 20


DIST = Path(os.environ.get("SCALE_DIST", "-"))
needs_wheels = pytest.mark.skipif(not DIST.is_dir(), reason="there are no wheels: nox -s build")


def resolve(requirements: tuple[str, ...], folder: Path) -> str:
    """Resolves an install line by uv, for an empty environment and without installing; returns its error, or "".

    A package of the checkout stands for its wheel. Where a line names such packages uv sees no other wheel of ours, as
    pip sees none; where it asks for them by name uv sees all. torch is the version that the noxfile pins, of whatever
    build there is: PyTorch's own index is not asked.
    """
    folder.mkdir()
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in DIST.glob("*.whl")}
    words, named = [], set()
    for requirement in requirements:
        word = requirement.removeprefix("./packages/")
        if word != requirement:
            named.add(name_of(word))
            word += f"=={wheels[name_of(word)].name.split('-')[1]}"
        words.append(re.sub(r"^(torch==[\d.]+)\+\w+$", r"\1", word))
    for name in named or wheels:
        (folder / wheels[name].name).symlink_to(wheels[name].resolve())
    pinned = re.search(r'^TORCH_DEFAULT = "(.+)"$', (HOUSE / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned, "the noxfile pins no torch"
    (folder / "constraints.txt").write_text(f"torch=={pinned[1]}\n")
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--target", str(folder / "empty")]
    command += ["--constraints", str(folder / "constraints.txt")]
    command += [
        word for name in wheels for word in ("--refresh-package", name)
    ]  # a version stays, its content does not
    links = ",".join(filter(None, [os.environ.get("UV_FIND_LINKS"), str(folder)]))
    environment = os.environ | {"UV_FIND_LINKS": links}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""


@needs_wheels
def test_every_install_line_is_resolved(tmp_path: Path) -> None:
    lines: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for where, requirements in install_lines(page):
            if requirements:
                lines.setdefault(tuple(sorted(requirements)), where)
    errors = {where: resolve(line, tmp_path / str(index)) for index, (line, where) in enumerate(lines.items())}
    print(f"{len(lines)} distinct install lines")
    assert [f"{where}: {error}" for where, error in errors.items() if error] == []
    assert len(lines) > 10


@needs_wheels
def test_a_line_that_misses_a_package_is_not_resolved(tmp_path: Path) -> None:
    assert "scale-core" in resolve(("./packages/scale-fsdp",), tmp_path / "line")
