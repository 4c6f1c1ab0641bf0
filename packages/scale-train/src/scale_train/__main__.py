"""`python -m scale_train ...` is `scale-train ...`."""

import sys

from scale_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
