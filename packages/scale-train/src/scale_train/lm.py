"""`scale-train lm`: checks the options, and joins the ranks that torchrun started or starts its own."""

from __future__ import annotations

import os

from scale_train.data import check_length, read_text
from scale_train.errors import reported
from scale_train.launch import is_under_torchrun, run_as_rank, start_ranks
from scale_train.memory import check_fits
from scale_train.options import Options
from scale_train.resolve import check_options, num_local_ranks


def language_model(options: Options) -> int:
    """Checks, starts or joins the ranks, and returns the exit code; what cannot work is printed in one line."""
    return reported(lambda: _language_model(options))


def _language_model(options: Options) -> int:
    if is_under_torchrun(os.environ):
        return run_as_rank(options)
    num_ranks = num_local_ranks(options)
    check_options(options, num_ranks)
    check_fits(options, num_ranks)
    check_length(read_text(options.data.text), options.data.sequence)
    return run_as_rank(options) if num_ranks == 1 else start_ranks(options, num_ranks)
