"""The guides, and the pages that a new user meets first, have no words that make a sentence hard to read.

`python tests/docs/test_plain_words.py HEAD~5` prints the numbers of an earlier commit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
FIRST = ["README.md", "docs/index.md", "docs/installation.md"]
WITH_TESTED_ROWS = {"sharded-parameters.md"}  # its rows are those of packages/scale-fsdp/tests/test_ordinary_lines.py
GUIDES = [path for path in sorted((HOUSE / "docs/guides").glob("*.md")) if path.name not in WITH_TESTED_ROWS]
ENTRY_PAGES = [*FIRST, *(path.relative_to(HOUSE).as_posix() for path in GUIDES)]
TUTORIALS = [path.relative_to(HOUSE).as_posix() for path in sorted((HOUSE / "docs/tutorials").glob("*.md"))]
HARD_WORDS = re.compile(
    r"\b(so many|so much|so often|alone|beside|another|refused|refuses|those of|that of|those with|as those|anew|alike"
    r"|whole|told|of which|such as|will do|(?<!there )is no|is an error|are an error|are errors|sees to|what is left"
    r"|for what|from what|which a test|of its own|of their own|of one's own|as of|go on)\b",
    re.IGNORECASE,
)
"""Say instead: the number of, only, with, different, not supported, it raises, of the layer, again, the same, full."""


def prose_of(page: str) -> str:
    """The words of a page without code, links and comments."""
    for pattern in (r"^([ ]*)```.*?^\1```", r"`[^`\n]*`", r"(?<=\])\([^)]*\)", r"<!--.*?-->"):
        page = re.sub(pattern, " x ", page, flags=re.MULTILINE | re.DOTALL)
    return page


def counted(text: str) -> tuple[int, list[str]]:
    """The number of words, and the hard ones with what stands around them."""
    prose = prose_of(text)
    found = [prose[max(0, hit.start() - 40) : hit.end() + 30] for hit in HARD_WORDS.finditer(prose)]
    return len(re.findall(r"[A-Za-z][\w'-]*", prose)), [" ".join(context.split()) for context in found]


@pytest.mark.parametrize("page", [*ENTRY_PAGES, *TUTORIALS])
def test_a_page_has_plain_words(page: str) -> None:
    num_words, found = counted((HOUSE / page).read_text(encoding="utf-8"))
    assert num_words > 50
    assert found == []


def test_hard_words_are_found_outside_of_code_only() -> None:
    text = "It is refused.\n\n```python\nanother = 1\n```\n\nUse `whole` and [this](another.md).\n"
    assert counted(text) == (9, ["It is refused. x Use x and [this] x ."])


def main(revision: str) -> None:
    words = hits = 0
    for page in ENTRY_PAGES:
        command = ["git", "show", f"{revision}:{page}"]
        shown = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False)
        if shown.returncode:
            continue  # that commit has no such page
        num_words, found = counted(shown.stdout)
        words, hits = words + num_words, hits + len(found)
        print(f"{page:42} {num_words:5} words, {len(found):3} hard, {1000 * len(found) / num_words:5.1f} per 1,000")
    print(f"{'all':42} {words:5} words, {hits:3} hard, {1000 * hits / words:5.1f} per 1,000")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["HEAD"])
