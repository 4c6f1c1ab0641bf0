"""`--model`: a causal language model of transformers, built on the meta device, with weights or initialized by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scale_core.comm.collectives import fingerprint_of
from scale_core.comm.group import Group
from scale_snapshot import SnapshotError, load_pretrained, save_pretrained
from scale_snapshot.pretrained.materialize import materialize
from scale_train.data.tokenizer import FileTokenizer, Tokenizer
from scale_train.errors import InputError
from scale_train.huggingface.config import config_file, has_weights, read_config

_SOURCE_FILES = ("generation_config.json", "chat_template.jinja")
_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
# Entries of a config that are not about the model itself.
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


@dataclass(frozen=True)
class TransformersSource:
    """Where a model comes from, and how it gets its values."""

    path: Path
    seed: int

    @property
    def has_weights(self) -> bool:
        return has_weights(self.path)

    def build_on_meta(self) -> nn.Module:
        """Returns the model in fp32, on the meta device, in training mode; an InputError where it cannot be built."""
        try:
            return build_on_meta(read_config(self.path)).train()
        except ValueError as error:
            raise InputError(str(error)) from error

    def initializer(self, model: nn.Module) -> Callable[[nn.Module], None]:
        """Returns a function that draws one module's parameters by transformers' rules, from the seed and its name.

        So values are the same in any order, and at any number of ranks.
        """
        owners: dict[nn.Parameter, str] = {}
        paths = {}
        for path, module in model.named_modules():
            params = list(module.parameters(recurse=False))
            paths[module] = owners.get(params[0], path) if params else path  # Tied weights have one name.
            for param in params:
                owners.setdefault(param, path)
        rule: Any = model._init_weights

        def init(module: nn.Module) -> None:
            torch.manual_seed(fingerprint_of(self.seed, paths[module]) % 2**63)
            with torch.no_grad():
                rule(module)

        return init

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Gives a plain model on the meta device memory, and values if it does not get weights."""
        init = self.initializer(model)
        materialize(model, device, init, set())
        if not self.has_weights:
            for module in model.modules():
                init(module)

    def load(self, model: nn.Module, device: torch.device, group: Group) -> None:
        """Loads the weights, if there are any, into the parts that this rank holds; called on all ranks."""
        if not self.has_weights:
            return
        try:
            load_pretrained(model, self.path, device=device, cast=True, process_group=group)
        except SnapshotError as error:
            raise InputError(f"--model {self.path}: {error}") from error


def build_on_meta(content: Mapping[str, Any]) -> nn.Module:
    """Returns the model of a config in fp32, on the meta device; an InputError where transformers is not installed."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError("--model: transformers is not installed: pip install 'scale-train[transformers]'") from error
    problem = f"--model: transformers cannot build a causal language model of {content['model_type']}"
    try:
        config = transformers_config(content)
        make: Any = AutoModelForCausalLM.from_config  # not annotated
        with torch.device("meta"):
            model: nn.Module = make(config, dtype=torch.float32)
    except ValueError as error:
        raise InputError(f"{problem}: {_without_list(error)}") from error
    return model


def transformers_config(content: Mapping[str, Any]) -> Any:
    """Returns the config of transformers with this content; a ValueError in one line where it is none."""
    from transformers import AutoConfig

    values = {name: value for name, value in content.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(content["model_type"], **values)
    except Exception as error:  # Checks of fields have errors of their own, under no common one.
        raise ValueError(_without_list(error)) from error


def _without_list(error: Exception) -> str:
    """The message of transformers, in one line, without its list of models."""
    message = " ".join(str(error).split())
    return re.split(r"\.? (?:Should contain one of|Model type should be one of)", message)[0]


def config_facts(model: nn.Module) -> dict[str, Any]:
    """Returns the model's config in a checkpoint, as JSON."""
    config: Any = model.config
    facts: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in facts.items() if name not in _VOLATILE}


def export_model(model: nn.Module, folder: Path, tokenizer: Tokenizer, source: Path | None, group: Group) -> None:
    """Writes a folder that `from_pretrained` reads, with the tokenizer; called on all ranks, an InputError on all.

    Args:
        model: Of transformers; sharded, divided or plain.
        folder: New, or empty.
        tokenizer: The tokenizer of the training; of bytes there is no file.
        source: The value of `--model`: how text is generated, and the template of a chat, go on from its folder.
        group: The ranks that hold the model.
    """
    try:
        save_pretrained(model, folder, process_group=group)
    except SnapshotError as error:
        raise InputError(f"--export {folder}: {error}") from error
    if group.rank != 0:
        return
    if source is not None:
        _copy(config_file(source).parent, _SOURCE_FILES, folder)
    if isinstance(tokenizer, FileTokenizer):
        (folder / "tokenizer.json").write_bytes(tokenizer.content)
        _copy(tokenizer.file.parent, _BESIDE_TOKENIZER, folder)


def _copy(source: Path, names: Iterable[str], target: Path) -> None:
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
