"""`scale-train export`, on one process. Exit codes: 0 done; 2 wrong input."""

from __future__ import annotations

from scale_core.comm.group import Group
from scale_train.errors import InputError, reported
from scale_train.huggingface.model import export_model
from scale_train.model.gpt import GPT
from scale_train.trained_model.loading import open_trained_model
from scale_train.trained_model.options import ExportOptions


def export(options: ExportOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _export(options))


def _export(options: ExportOptions) -> int:
    trained = open_trained_model(options.run)
    if isinstance(trained.model, GPT):
        raise InputError(
            f"{options.run}: the GPT of --size is not a model of transformers; its tensors are written by "
            f"scale-train snapshot consolidate {options.run} model.safetensors"
        )
    tokenizer = trained.open_tokenizer(options.tokenizer)
    export_model(trained.model, options.folder, tokenizer, trained.source, Group())
    print(f"export         {options.folder}")
    return 0
