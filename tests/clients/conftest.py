"""What all tests of clients need: ranks that have imported transformers already."""

import importlib
import warnings
from importlib.util import find_spec

from scale_core.testing import ranks as testing

# Importing these, as peft does where they are installed, warns of their own sources and of GPUs that are not there.
for library in ("torchao", "bitsandbytes"):
    if find_spec(library) is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(library)

# Importing takes seconds, for each rank of each call. Where ranks were started before in this session, they import.
testing._PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "t5")]
