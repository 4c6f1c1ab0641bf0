"""A page that is made with the site: all error texts, from the source.

A reader who searches for the text of an error finds the row with its kind and its module.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

PACKAGES = Path(__file__).parents[2] / "packages"
MAX_WORDS = 16
PRIVATE = {"AttributeError", "AssertionError", "StopIteration", "KeyboardInterrupt"}
HEAD = """# Error texts

The first words of each error, by package, as they stand in the source; `…` is a name or a value. What to do is in the
rest of the message, and for errors between ranks in [troubleshooting](troubleshooting.md#error-classes).
"""


def raised(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the first words and the class of each error that a file raises with a text of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        kind = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
        words = text_of(node.exc.args[0]).split()
        if kind[:1].isupper() and kind not in PRIVATE and len([word for word in words if word != "…"]) > 2:
            yield " ".join(words[:MAX_WORDS]) + (" ..." if len(words) > MAX_WORDS else ""), kind


def text_of(node: ast.expr) -> str:
    """Returns the text of a message, with … in the place of values; "" if it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


def error_texts() -> str:
    """Returns the page of error texts."""
    parts = [HEAD]
    for package in sorted(PACKAGES.glob("*/src/*/__init__.py")):
        folder = package.parent
        rows: dict[tuple[str, str], str] = {}
        for path in sorted(folder.rglob("*.py")):
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            for text, kind in raised(path):
                rows.setdefault((text, kind), module)
        if rows:
            lines = [f"| {_cell(text)} | {kind} | `{module}` |" for (text, kind), module in sorted(rows.items())]
            parts.append(
                "\n".join([f"## {folder.name}", "", "| text | raised as | module |", "|---|---|---|", *lines, ""])
            )
    return "\n".join(parts)


def _cell(text: str) -> str:
    return f"`{text.replace('|', '/').replace('`', chr(39))}`"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    page = File.generated(config, "guides/error-texts.md", content=error_texts(), inclusion=InclusionLevel.NOT_IN_NAV)
    files.append(page)
    return files
