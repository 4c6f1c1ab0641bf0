"""`python -m scale_check.script [script.py ...]`: runs the script in processes that are forked from this one."""

from __future__ import annotations

import sys

from scale_check.script.fork_server import serve

if __name__ == "__main__":
    serve(sys.argv[1:])
