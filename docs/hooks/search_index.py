"""What the search of the site finds: decisions and copies of the source are left out, guides come before the rest."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LEFT_OUT = ("decisions/0", "decisions/template")
BOOSTS = {
    "api/": 0.05,
    "glossary": 0.1,
    "composition": 0.5,
    "how-": 0.5,
    "guides/error-texts": 0.02,
    "guides/fairscale-names": 0.5,
    "guides/faults": 0.2,
    "guides/reliability-figures": 0.1,
    "tutorials/": 0.5,
    "guides/adascale.md": 1.5,
    "guides/compared": 0.3,
    "guides/debugging.md": 2,
    "guides/fsdp.md": 1.5,
    "guides/fsdp2-differences.md": 0.7,
    "guides/memory-planner.md": 0.7,
    "guides/migration-fairscale.md": 1.5,
    "guides/migration-fsdp.md": 0.3,
    "guides/migration-pipelines.md": 0.5,
    "guides/oss.md": 1.5,
    "guides/tensor-parallel.md": 1.6,
    "guides/troubleshooting.md": 1.5,
}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sets what the search plugin reads: whether a page is found, and how far in front."""
    path = page.file.src_uri
    search: dict[str, Any] = {}
    if path.startswith(LEFT_OUT):
        search["exclude"] = True
    for beginning, boost in BOOSTS.items():
        if path.startswith(beginning):
            search["boost"] = boost
    page.meta["search"] = {**search, **page.meta.get("search", {})}
    return markdown
