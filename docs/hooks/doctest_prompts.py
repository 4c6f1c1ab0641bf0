"""Examples in the site are plain programs: without prompts, and with what they print in comments.

So a reader may copy them, by the button or by hand, and run them. The pages and docstrings keep their prompts, because
the tests read them. Docstrings have examples as indented text, too, which is highlighted here.
"""

import html
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

CODE = re.compile(
    r'<div class="(?:language-\w+ )?highlight"><pre>(.*?)</pre></div>|<pre><code>(.*?)</code></pre>', re.DOTALL
)
TAG = re.compile(r"<[^>]+>")
FORMATTER = HtmlFormatter(cssclass="highlight", wrapcode=True)


def program_of(session: str) -> str:
    """Returns the program of a session: prompts are left out, and what it prints becomes comments."""
    lines = []
    for line in session.strip("\n").splitlines():
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:].replace("  # doctest: +SKIP", ""))
        elif line in (">>>", "..."):
            lines.append("")
        else:
            lines.append(f"# {line}" if line else "")
    return "\n".join(lines).rstrip() + "\n"


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites blocks that begin with a prompt."""

    def rewritten(block: re.Match[str]) -> str:
        session = html.unescape(TAG.sub("", block[1] or block[2]))
        if not session.lstrip("\n").startswith(">>>"):
            return block[0]
        return highlight(program_of(session), PythonLexer(), FORMATTER)

    return CODE.sub(rewritten, content)
