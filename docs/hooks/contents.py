"""Attributes of classes stay out of the table of contents of API pages, which lists classes, functions and methods."""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ATTRIBUTE = re.compile(r'<div class="doc doc-object doc-attribute">\s*<h\d id="([\w.]+)"')


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes attributes from the table, and leaves the page unchanged."""
    attributes = set(ATTRIBUTE.findall(content))

    def without_attributes(items: list[AnchorLink]) -> list[AnchorLink]:
        kept = [item for item in items if item.id not in attributes]
        for item in kept:
            item.children = without_attributes(item.children)
        return kept

    page.toc.items = without_attributes(page.toc.items)
    return content
