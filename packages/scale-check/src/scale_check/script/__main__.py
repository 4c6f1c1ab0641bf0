"""`python -m scale_check.script FILE`: one process of `scale-check run`, as the pickled task in the file says."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from scale_check.script.rank import run_task

if __name__ == "__main__":
    ended = run_task(pickle.loads(Path(sys.argv[1]).read_bytes()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # Past the ends of groups and threads that the script has been taken from.
