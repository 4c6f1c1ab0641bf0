"""`python -m scale_train ...` is `scale-train ...`."""

import sys

from scale_train.cli import main

sys.exit(main())
