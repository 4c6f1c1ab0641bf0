"""What the search of the site finds: reports and copies of the source are left out, guides come before the rest."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LEFT_OUT = ("internals/",)
BOOSTS = {
    "api/": 0.05,
    "how-": 0.5,
    "guides/error-texts": 0.02,
    "tutorials/": 0.5,
    "tutorials/index.md": 1,
    "guides/adascale.md": 1.5,
    "guides/checkpoint.md": 0.8,
    "guides/debugging.md": 2,
    "guides/fsdp.md": 1.8,
    "guides/migration-fairscale.md": 1.5,
    "guides/migration-fsdp.md": 0.5,
    "guides/migration-others.md": 0.5,
    "guides/oss.md": 1.5,
    "guides/pipe.md": 1.9,
    "guides/check.md": 1,
    "guides/races.md": 0.8,
    "guides/saving.md": 1.5,
    "guides/scale-further.md": 1.7,
    "guides/scale-train.md": 1.3,
    "guides/scale-train-tools.md": 1.7,
    "guides/sharded-parameters.md": 1,
    "guides/tensor-parallel.md": 1.2,
    "guides/trainers.md": 1.48,
    "guides/troubleshooting.md": 1.5,
    "guides/which-technique.md": 1,
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
