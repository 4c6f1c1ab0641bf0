"""What all tests of clients need: ranks that have imported transformers already."""

from scale_core.testing import ranks as testing

# Importing takes seconds, for each rank of each call. Where ranks were started before in this session, they import.
testing._PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "t5")]
