"""`scale-train lm` and `train`: check the options, and join the ranks that torchrun started or start their own."""

from __future__ import annotations

import os
import sys

from scale_train.configuration.command_line import with_checked_types
from scale_train.configuration.problems import OptionsError
from scale_train.configuration.resolve import check_options, num_local_ranks
from scale_train.data.text import check_length, read_data
from scale_train.errors import InputError
from scale_train.launch.launcher import RankExit, is_under_torchrun, start_ranks, train_rank
from scale_train.options import Options
from scale_train.training.memory import check_fits
from scale_train.training.train import RunSummary


def train(options: Options) -> RunSummary:
    """Trains as `scale-train lm` does: on local ranks that it starts, or as a rank that torchrun has started.

        from scale_train import DataOptions, OptimizerOptions, Options, train

        if __name__ == "__main__":  # each rank reads this file again
            data, optimizer = DataOptions(text=("my-text",)), OptimizerOptions(steps=100)
            summary = train(Options(data=data, optimizer=optimizer))
            print(summary.held_out_bits_per_byte)

    Args:
        options: The values of the command line's flags, by the same names.

    Returns:
        Held-out loss, memory, and where the checkpoint is.

    Raises:
        InputError: Options that cannot be meant, all of them named, or that cannot be trained here.
        TrainingDiverged: The loss or a weight is not a finite number.
        RanksLost: A rank ended early.
        Interrupted: A signal ended it, and the last step is saved.

    Examples:
        >>> from scale_train import DataOptions, ModelOptions, Options, OptimizerOptions, ParallelOptions, train
        >>> options = Options(
        ...     data=DataOptions(sequence=16, batch=2, held_out_tokens=64),
        ...     model=ModelOptions(layers=1, width=16, heads=2),
        ...     parallel=ParallelOptions(ranks=1, parallel="none", device="cpu"),
        ...     optimizer=OptimizerOptions(steps=2),
        ... )
        >>> summary = train(options)  # doctest: +SKIP

    See also: [the guide to the training program](../guides/scale-train.md).
    """
    try:
        ended = _outcome(with_checked_types(options))
    except OptionsError as error:
        raise InputError(str(error)) from error
    if isinstance(ended, RankExit):
        raise ended.to_error()
    return ended


def language_model(options: Options) -> int:
    """Trains, and returns the exit code; an impossible request is printed in one line."""
    try:
        ended = _outcome(options)
    except InputError as error:
        print(f"scale-train: {error}", file=sys.stderr)
        return error.exit_code
    if not isinstance(ended, RankExit):
        return 0
    if ended.message and (not is_under_torchrun(os.environ) or ended.should_print(os.environ)):
        print(ended.message, file=sys.stderr, flush=True)
    return ended.code


def _outcome(options: Options) -> RunSummary | RankExit:
    if is_under_torchrun(os.environ):
        return train_rank(options)
    num_ranks = num_local_ranks(options)
    check_options(options, num_ranks)
    check_fits(options, num_ranks)
    check_length(read_data(options), options.data.sequence)
    return train_rank(options) if num_ranks == 1 else start_ranks(options, num_ranks)
