"""Looks at the built site in a real browser: pictures on a desk (1400 px) and on a phone (390 px).

    nox -s docs                                          # builds the site
    python tools/screenshots.py                     # pictures of all guides, into docs-screenshots
    python tools/screenshots.py guides/fsdp --dark  # of one page
    python tools/screenshots.py --smoke             # says which browser there is

Needs Chromium or Chrome. Nothing that it writes is committed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = {"desk": 1400, "phone": 390}
FRAME = '<html><body style="margin:0"><iframe src="{page}" width="390" height="{height}" style="border:0"></iframe>'


class Site(SimpleHTTPRequestHandler):
    """The files of the site, and each page in a frame as wide as a phone, which windows can't be."""

    def do_GET(self) -> None:
        if not self.path.startswith("/phone/"):
            return super().do_GET()
        _, _, height, page = self.path.split("/", 3)
        body = FRAME.format(page=f"/{page.lstrip('/')}", height=height).encode()  # "//" is another host
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def run(browser: str, *arguments: str) -> str:
    """Runs the browser without a window, and returns what it prints."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="such as guides/fsdp; all guides without")
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "docs-screenshots")
    parser.add_argument("--height", type=int, default=2200)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if arguments.smoke:
        print(f"browser: {browser}")
        return
    if browser is None or not arguments.site.exists():
        sys.exit("this needs Chromium, and a built site: nox -s docs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(arguments.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    pages = arguments.pages or sorted(
        str(path.parent.relative_to(arguments.site)) for path in arguments.site.glob("guides/*/index.html")
    )
    arguments.out.mkdir(exist_ok=True)
    for page in pages:
        for name, width in WIDTHS.items():
            path = arguments.out / f"{page.strip('/').replace('/', '-') or 'index'}-{name}.png"
            where = f"{base}/{page}/" if name == "desk" else f"{base}/phone/{arguments.height}/{page}/"
            options = [f"--window-size={max(width, 500)},{arguments.height}", f"--screenshot={path}"]
            run(browser, *options, *(["--force-dark-mode"] if arguments.dark else []), where)
            print(path)


if __name__ == "__main__":
    main()
