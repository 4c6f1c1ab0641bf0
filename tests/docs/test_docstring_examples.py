"""What is public has an example: each function and class that a package exports or that an API page shows.

The sources are parsed and not imported, so this also sees packages whose libraries are not installed. The examples run
as doctests in the sessions of their packages (`nox -t scale-fsdp`).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[2]
RESULTS = {
    "Routing": "top_k_routing",
    "DispatchPlan": "plan_dispatch",
    "Recognized": "recognize",
    "Format": "recognize",
    "StoredState": "open_checkpoint",
    "Race": "simulate",
    "Simulation": "simulate",
    "RunSummary": "train",
}
"""Classes that nobody makes by hand, and the public name that returns them or is given them: its example shows them."""
NOT_RUN = {
    "launch_local": "starts ranks",
    "train": "trains a model",
    "parallelize_experts": "needs a model of transformers",
}
"""Examples that are shown and not run in a doctest, and why."""
WITHOUT = {
    "ScaleTrainer": "the guide to Hugging Face has its program, which the clients run",
    "ScaleTrainerMixin": "as ScaleTrainer",
    "FSDPOptions": "the options of the strategies, which have examples",
    "OSSOptions": "as FSDPOptions",
    "ShardedDDPOptions": "as FSDPOptions",
}

Node = ast.FunctionDef | ast.ClassDef


@cache
def tree_of(module: str) -> ast.Module | None:
    """Returns the parsed source of a module, by its name."""
    path = module.replace(".", "/")
    for found in (*HOUSE.glob(f"packages/*/src/{path}.py"), *HOUSE.glob(f"packages/*/src/{path}/__init__.py")):
        return ast.parse(found.read_text(encoding="utf-8"))
    return None


def definition(module: str, name: str) -> Node | None:
    """Returns where a name is defined, through the imports of modules; None for what is neither function nor class."""
    tree = tree_of(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, Node) and node.name == name:
            return node
    for each in ast.walk(tree):  # also those that only a type checker sees, of names that are imported when asked for
        if isinstance(each, ast.ImportFrom) and each.module:
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return definition(each.module, alias.name)
    return None


def exported(package: str) -> list[str]:
    """Returns what a package lists in `__all__`."""
    tree = tree_of(package)
    assert tree is not None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.List) else []
    return []


def shown(page: str) -> list[tuple[str, str]]:
    """Returns the modules and names that a page of the API shows."""
    found = []
    for path, options in re.findall(r"^::: ([\w.]+)((?:\n[ ]+.*)*)", page, re.MULTILINE):
        tree = tree_of(path)
        if tree is None:
            found.append(tuple(path.rsplit(".", 1)))
            continue
        members = re.search(r"members:\s*\[([^\]]*)\]", options) or re.search(r"members:((?:\s+- \w+)+)", options)
        defined = [node.name for node in tree.body if isinstance(node, Node) and not node.name.startswith("_")]
        found += [(path, name) for name in (re.findall(r"\w+", members[1]) if members else defined)]
    return found


def is_error(node: Node) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.endswith(
        ("Error", "Mismatch", "Interrupted", "Lost", "Diverged")
    )


@cache
def api_pages() -> dict[str, str]:
    """Returns for each package the text of its API page, which names its packages in its title."""
    pages = [path.read_text(encoding="utf-8") for path in (HOUSE / "docs/api").glob("*.md")]
    return {package: page for page in pages for package in re.findall(r"\bscale_\w+", page.partition("\n")[0])}


@cache
def public(*, errors: bool = False) -> dict[str, Node]:
    """Returns the functions and classes that users call, or the errors that they catch, by package and name."""
    found: dict[str, Node] = {}
    for package, page in api_pages().items():
        names = [(package, name) for name in exported(package)]
        names += [(module, name) for module, name in shown(page) if module.split(".")[0] == package]
        for module, name in names:
            node = definition(module, name)
            if node is not None and is_error(node) is errors:
                found.setdefault(f"{package}: {name}", node)
    return found


def test_each_public_callable_has_an_example() -> None:
    nodes = public()
    assert len(nodes) > 250, "the pages of the API were not read"
    without, exceptions = [], RESULTS.keys() | WITHOUT.keys()
    for title, node in nodes.items():
        doc = ast.get_docstring(node) or ""
        if ">>>" not in doc and node.name not in exceptions:
            without.append(title)
    assert without == [], "write a short doctest on one process, or name the function that returns it in RESULTS"
    with_one = {node.name for node in nodes.values() if ">>>" in (ast.get_docstring(node) or "")}
    names = {node.name for node in nodes.values()}
    assert [name for name in sorted(exceptions) if name not in names] == [], "no exceptions any more"
    assert [name for name in RESULTS.values() if name not in with_one] == []


def test_examples_run_but_for_those_that_say_why() -> None:
    skipped = {node.name for node in public().values() if "+SKIP" in (ast.get_docstring(node) or "")}
    assert skipped == NOT_RUN.keys()


def test_each_public_name_links_to_its_guide() -> None:
    nodes, errors = public(), public(errors=True)
    assert len(errors) > 20
    without = []
    for title, node in (nodes | errors).items():
        links = re.findall(r"See also: .*?\]\(\.\./([\w/-]+\.md)(?:#[\w-]+)?\)", ast.get_docstring(node) or "")
        if len(links) != 1 or not (HOUSE / "docs" / links[0]).exists():
            without.append(title)
    assert without == []


def test_type_aliases_of_arguments_are_explained_on_the_api_page() -> None:
    aliases = {
        node.target.id
        for path in HOUSE.glob("packages/scale-*/src/scale_*/**/*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "TypeAlias"
    }
    wrong = []
    for title, node in public().items():
        package, _, name = title.partition(": ")
        functions = [node] if isinstance(node, ast.FunctionDef) else constructors(node)
        page = api_pages()[package]
        if name in exported(package):
            for function in functions:
                for argument in (*function.args.args, *function.args.kwonlyargs):
                    used = set(
                        re.findall(r"\b[A-Z]\w+", ast.unparse(argument.annotation) if argument.annotation else "")
                    )
                    wrong += [f"{package}: {alias} of {name}" for alias in used & aliases if f"`{alias}`" not in page]
    assert len(aliases) > 20 and wrong == []


def constructors(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
