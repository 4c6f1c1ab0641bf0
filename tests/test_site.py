"""What holds for the documentation: its search, its length, its form. `nox -s docs` builds the site and runs this.

Of a checkout alone; what reads the built index is skipped where there is no site, or no lunr.
"""

from __future__ import annotations

import ast
import html
import json
import os
import re
import runpy
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = Path(os.environ.get("SCALE_SITE", ROOT / "site"))
MADE = {"internals/reliability-figures.md"}  # by tools/figures.py
MADE_WITH_THE_SITE = {"guides/error-texts"}  # by docs/hooks/generated_pages.py
WITHOUT_A_QUERY = {
    "index": "the home page links to all others",
}
"""Pages of the navigation that no query is to find, and why; those of the API are found by the names of the code."""
MAX_WORDS = 2700
MAX_WORDS_LOOKED_UP = 3700
LOOKED_UP = {"guides/troubleshooting.md", "guides/migration-fairscale.md"}
"""Pages that nobody reads from end to end: a reader looks up an error or a name, and wants one place for it."""
MAX_PAGES = 43
MAX_COLUMNS = 88
MAX_API_COLUMNS = 111  # in the smaller letters of stylesheets/extra.css

pages = [
    pytest.param(path, id=str(path.relative_to(DOCS)))
    for path in sorted(DOCS.rglob("*.md"))
    if "decisions" not in path.parts and "hooks" not in path.parts
]


# -------------------------------------------------------------------------------------------------------------- search
class SiteSearch:
    """The search of the site: Material's, which is lunr's with boosts for titles and whole pages.

    A word of a query stands for all words that begin with it. A section's score counts (1 + (p + m)²) times, with p 1
    for a page and 0 for a section of one, and m the share of the query's words that it contains; sections of one page
    stand together at the place of the best.
    """

    def __init__(self, index: dict[str, Any]) -> None:
        from lunr import lunr

        self.separator = re.compile(index["config"]["separator"])
        self.sections = {section["location"]: section for section in index["docs"]}
        documents = [
            (
                {
                    "location": section["location"],
                    "title": " ".join(self.words(section["title"])),
                    "text": " ".join(self.words(section["text"])),
                },
                {"boost": section.get("boost", 1)},
            )
            for section in index["docs"]
        ]
        fields = [
            {"field_name": name, "boost": options["boost"]}
            for name, options in index["config"]["fields"].items()
            if name != "tags"
        ]
        self.index = _built(lunr, documents, fields)

    def words(self, text: str) -> list[str]:
        plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
        return [word.lower() for word in self.separator.split(plain) if word]

    def pages(self, query: str) -> list[str]:
        """Returns the pages that a query finds, the best first, without their ending."""
        words = self.words(query)
        found: list[tuple[float, str]] = []
        for result in self.index.search(" ".join(f"{word}*" for word in words)):
            matched = result["match_data"].metadata.keys()
            share = sum(any(term.startswith(word) for term in matched) for word in words) / len(words)
            is_page = "#" not in result["ref"]
            found.append((result["score"] * (1 + (is_page + share) ** 2), result["ref"]))
        found.sort(key=lambda each: -each[0])
        return list(dict.fromkeys(ref.split("#")[0].strip("/") for _, ref in found))


def _built(lunr: Any, documents: list[Any], fields: list[Any]) -> Any:
    """Returns an index that is scored as the site's: no stemmer, and lengths do not count."""
    from lunr import get_default_builder, stop_word_filter

    builder = get_default_builder()
    builder.pipeline.reset()
    builder.search_pipeline.reset()
    builder.pipeline.add(stop_word_filter.stop_word_filter)
    builder.b(0)
    return lunr(ref="location", fields=fields, documents=documents, builder=builder)


@cache
def search() -> SiteSearch:
    pytest.importorskip("lunr")
    path = SITE / "search" / "search_index.json"
    if not path.exists():
        pytest.skip("the site is not built: nox -s docs")
    return SiteSearch(json.loads(path.read_text(encoding="utf-8")))


def queries() -> list[tuple[str, list[str]]]:
    lines = (DOCS / "search-queries.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    return [(query, [page.strip() for page in found.split("|")]) for query, found in pairs]


@pytest.mark.parametrize("query, expected", [pytest.param(*pair, id=pair[0]) for pair in queries()])
def test_a_search_shows_the_page_that_answers_it_first(query: str, expected: list[str]) -> None:
    found = search().pages(query)
    assert found, "nothing is found"
    assert found[0] in [page.removesuffix("/index") for page in expected], f"found {found[:4]}"


def test_each_page_that_a_query_is_to_find_exists() -> None:
    wanted = {page for _, expected in queries() for page in expected}
    assert [
        page for page in sorted(wanted) if not (DOCS / f"{page}.md").exists() and page not in MADE_WITH_THE_SITE
    ] == []


def navigation() -> list[str]:
    """Returns the pages that the site's navigation names, without their ending."""
    _, _, lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    return re.findall(r"^ *- (?:.*: )?([\w/.-]+)\.md$", lines, re.MULTILINE)


def test_each_page_of_the_navigation_has_a_query() -> None:
    pages, wanted = navigation(), {page for _, expected in queries() for page in expected}
    assert 30 < len(pages) == len(set(pages)), "the navigation was not read, or names a page twice"
    assert len(pages) <= MAX_PAGES, "merge pages that answer one question"
    assert [page for page in WITHOUT_A_QUERY if page not in pages or page in wanted] == [], "no exceptions any more"
    without = [page for page in pages if page not in wanted and page not in WITHOUT_A_QUERY]
    assert [page for page in without if not page.startswith("api/")] == [], "write one in docs/search-queries.txt"


def test_reports_and_copies_of_the_source_are_not_found() -> None:
    assert [where for where in search().sections if re.match(r"decisions/|design/|internals/|source/", where)] == []


def test_reports_and_figures_are_not_in_the_navigation() -> None:
    reports = {path.stem for path in (DOCS / "internals").glob("*.md")} - {"index"}
    assert len(reports) > 5 and (DOCS / "internals/faults.md").exists()
    assert [page for page in navigation() if page.rsplit("/", 1)[-1] in reports - {"composition"}] == []
    tabs = re.findall(r"^  - ([\w ]+):", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    asked = ["Get started", "Tutorials", "Guides", "Train", "Migrate", "Debug", "API", "Internals"]
    assert [tab for tab in tabs if tab in asked] == asked


# -------------------------------------------------------------------------------------------------------------- errors
def test_troubleshooting_quotes_errors_as_the_code_says_them() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page[page.index("| the error says |") :].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    source = ""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                source += node.value
    assert len(quoted) > 8
    assert [text for text in quoted if text not in source] == []


# ----------------------------------------------------------------------------------------------------------------- API
def public_names(package: Path) -> list[str]:
    """Returns what a package lists in `__all__`."""
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.List) else []
    return []


def api_pages() -> dict[str, str]:
    """Returns the API page of each package. A page names its packages in its title."""
    pages = {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in (DOCS / "api").glob("*.md")}
    return {package: stem for stem, title in pages.items() for package in re.findall(r"\w*scale\w*", title)}


@pytest.mark.parametrize("package", sorted(api_pages().keys() - {"fairscale"}))
def test_the_api_page_has_every_public_name_once(package: str) -> None:
    stem = api_pages()[package]
    page = SITE / "api" / stem / "index.html"
    if not page.exists():
        pytest.skip("the site is not built: nox -s docs")
    source = (DOCS / "api" / f"{stem}.md").read_text(encoding="utf-8")
    headings = re.findall(r'<h\d id="(scale_[\w.]+)"', page.read_text(encoding="utf-8"))
    others = {other for other, its_stem in api_pages().items() if its_stem == stem} - {package}
    headings = [name for name in headings if name.split(".")[0] not in others]
    found = [name.rsplit(".", 1)[-1] for name in headings if not re.search(r"\.[A-Z]\w*\.", name)]
    init = next(ROOT.glob(f"packages/*/src/{package}/__init__.py"))
    names = [name for name in public_names(init) if found.count(name) != 1 and f"`{name}`" not in source]
    assert names == [], "missing, or there more than once; in backquotes where it is another's"


def test_each_package_has_an_api_page() -> None:
    """`torchgpipe` is on the page of `fairscale`."""
    packages = {path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")} - {"torchgpipe"}
    assert packages == api_pages().keys()


@pytest.mark.parametrize("package", [path.stem for path in sorted((DOCS / "api").glob("*.md"))])
def test_code_on_an_api_page_is_not_cut_at_1400_pixels(package: str) -> None:
    page = SITE / "api" / package / "index.html"
    if not page.exists():
        pytest.skip("the site is not built: nox -s docs")
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()]
    assert [line for line in lines if len(line) > MAX_API_COLUMNS] == []


def test_examples_are_copied_without_prompts() -> None:
    if not SITE.is_dir():
        pytest.skip("the site is not built: nox -s docs")
    wrong, seen = [], 0
    for page in sorted(SITE.glob("*/**/index.html")):
        blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
        for block in blocks:
            code = html.unescape(re.sub(r"<[^>]+>", "", block)).strip("\n")
            wrong += [
                f"{page.parent.relative_to(SITE)}: {line}" for line in code.splitlines() if line.startswith(">>>")
            ]
            seen += code.startswith(("import torch\n", "from scale_"))
    assert wrong == [] and seen > 100


def test_each_session_becomes_a_program() -> None:
    pytest.importorskip("mkdocs")
    path = DOCS / "hooks" / "doctest_prompts.py"
    names = runpy.run_path(str(path))
    session = ">>> for x in range(2):\n...     print(x)\n0\n1\n>>> x  # doctest: +SKIP\n1\n\n"
    program = "for x in range(2):\n    print(x)\n# 0\n# 1\nx\n# 1\n"
    assert names["program_of"](session) == program
    compile(program, "program", "exec")
    sessions = []
    for page in sorted(DOCS.rglob("*.md")):
        blocks = re.findall(
            r"^([ ]*)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        sessions += [textwrap.dedent(block) for _, block in blocks if block.lstrip().startswith(">>>")]
    for session in sessions:
        compile(names["program_of"](session), "program", "exec")
    assert len(sessions) > 50


def public_members() -> dict[str, tuple[list[str], set[str]]]:
    """Returns for each class of ours its bases and its public members that have docstrings."""
    found: dict[str, tuple[list[str], set[str]]] = {}
    for path in sorted(ROOT.glob("packages/*/src/scale_*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in node.bases]
                functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                names = {each.name for each in functions if ast.get_docstring(each) and not each.name.startswith("_")}
                found[node.name] = (bases, names)
    return found


@pytest.mark.parametrize("package", [path.stem for path in sorted((DOCS / "api").glob("scale_*.md"))])
def test_the_api_page_shows_inherited_members(package: str) -> None:
    page = SITE / "api" / package / "index.html"
    if not page.exists():
        pytest.skip("the site is not built: nox -s docs")
    source = (DOCS / "api" / f"{package}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^::: ([\w.]+)((?:\n[ ]+.*)*)", source, re.MULTILINE)
    chosen = {path.rsplit(".", 1)[-1] for path, options in blocks if "members:" in options}
    ids = set(re.findall(r'<h\d id="(scale_[\w.]+)"', page.read_text(encoding="utf-8")))
    classes, missing = public_members(), []
    for path in sorted(ids):
        name = path.rsplit(".", 1)[-1]
        if name not in classes or name in chosen:
            continue
        bases = list(classes[name][0])
        for base in bases:  # grows while it is read
            above, members = classes.get(base, ([], set()))
            bases += above
            missing += [f"{path}.{member}" for member in sorted(members) if f"{path}.{member}" not in ids]
    assert missing == []


# ---------------------------------------------------------------------------------------------------------------- form
@pytest.mark.parametrize("page", pages)
def test_a_page_is_short_and_its_code_is_narrow(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = []
    name = str(page.relative_to(DOCS))
    most = MAX_WORDS_LOOKED_UP if name in LOOKED_UP else MAX_WORDS
    if name not in MADE and len(text.split()) > most:
        wrong.append(f"{len(text.split())} words, of at most {most}: split it by question")
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        wrong += [f"a line of {len(line)} columns: {line}" for line in block.splitlines() if len(line) > MAX_COLUMNS]
    for head in re.findall(r"^(\|.*\|)\n\|[ :|-]+\|$", text, re.MULTILINE):  # the corner of a matrix may be empty
        cells = [cell.strip() for cell in head.strip("|").split("|")]
        if not all(cells[1:]):
            wrong.append(f"a column without a header, after: {text[: text.index(head)].strip().splitlines()[-1][:60]}")
    assert not wrong, "\n".join(wrong)
