"""Links of the documentation to the source, `[gather](../packages/.../buffer.py#FlatBuffer.gather)`, and to DESIGN.md.

In a checkout such a link opens the file. In the site it leads to a page with the source and to the line where the name
is defined; a name that is no longer there ends the build. The design note of each package is a page of the site.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DESIGN_LINK = re.compile(r"\]\((?:\.\./)+(?:packages/)?([\w-]+)/DESIGN\.md")
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(packages/[\w/.-]+/src/([\w/]+)\.py)(?:#([\w.]+))?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each design note, and for each source file that some page links to."""
    for path in sorted([*ROOT.glob("packages/*/DESIGN.md"), ROOT / "tests" / "DESIGN.md"]):
        content = f"---\nsearch: {{exclude: true}}\n---\n{path.read_text(encoding='utf-8')}"
        uri = f"design/{path.parent.name}.md"
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    linked = {
        (path, name) for file in files.documentation_pages() for _, path, name, _ in LINK.findall(file.content_string)
    }
    for path, name in sorted(linked):
        source = (ROOT / path).read_text(encoding="utf-8")
        content = f'---\nsearch: {{exclude: true}}\n---\n# {name}.py\n\n````python linenums="1"\n{source}````\n'
        files.append(File.generated(config, f"source/{name}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to the source to these pages."""

    def target(link: re.Match[str]) -> str:
        words, path, name, definition = link.groups()
        line = _line_of(ROOT / path, definition) if definition else 1
        if line is None:
            raise PluginError(f"{page.file.src_uri}: there is no {definition} in {path}")
        here = posixpath.relpath(f"source/{name}", page.url or ".")
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", words)
        return f'<a href="{here}/#__codelineno-0-{line}">{words}</a>'

    folder = posixpath.dirname(page.file.src_uri)
    markdown = DESIGN_LINK.sub(lambda link: f"]({posixpath.relpath(f'design/{link[1]}.md', folder or '.')}", markdown)
    return LINK.sub(target, markdown)


def _line_of(path: Path, name: str) -> int | None:
    """Returns the line of a function, class or method, `Class.method`; None where there is none of that name."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    line = None
    for part in name.split("."):
        found = next((each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part), None)
        if found is None:
            return None
        node, line = found, getattr(found, "lineno", None)
    return line
