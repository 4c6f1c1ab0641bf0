"""Doctests of pages are highlighted as sessions, so that the copy button can leave out prompts and output.

The pages say `python`, as GitHub and the tests read them. `stylesheets/extra.css` hides what is not to be copied.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FENCE = re.compile(r"^( *```)python(\n *>>> )", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names the language of blocks that begin with a prompt."""
    return FENCE.sub(r"\1pycon\2", markdown)
