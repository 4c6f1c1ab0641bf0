"""Modules of FairScale's without a counterpart: their names import, and say what to write when they are used."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch import nn

from fairscale._warnings import Refused

_STEP = "loss = pipe.step(batch, target=target, loss_fn=loss_fn)"
_MODULES_ELSEWHERE = "its modules are in other processes, driven over torch's RPC, which is deprecated"

NOT_OFFERED = {  # By module: of each name why, and what to write.
    "nn.ampnet_pipe.pipe": {
        "AMPnetPipe": (
            "its stages update on gradients of older weights, so that no run equals plain PyTorch",
            "scale_pipe.DistributedPipe with schedule='1f1b', whose stages work at the same time, too",
        )
    },
    "nn.distributed_pipeline.graph": {
        "PipelineModulesGraph": (
            _MODULES_ELSEWHERE,
            'one model of which each rank keeps its stages: stages = scale_pipe.split(model, ["blocks.4"]), where an '
            "output may go to any later stage",
        )
    },
    "nn.distributed_pipeline.loss": {
        "DistributedLoss": (
            "the output of the last stage does not leave its rank, where the loss is computed",
            f"{_STEP}, which is the same scalar on all ranks",
        )
    },
    "nn.distributed_pipeline.pipeline": {
        "DistributedPipeline": (
            _MODULES_ELSEWHERE,
            f'pipe = scale_pipe.DistributedPipe(stages, "1f1b", chunks=chunks) on all ranks, and {_STEP}',
        )
    },
    "nn.distributed_pipeline.trace": {
        "make_graph": (
            "a graph of modules in other processes has no counterpart",
            'stages = scale_pipe.split(model, ["blocks.4"]), which traces nothing and runs the model\'s own forward',
        )
    },
    "nn.mevo": {
        "MEVO": (
            "it wrote gradients into the weight past autograd and past every wrapper, which sharding cannot see",
            "scale_tp.vocab_parallel_cross_entropy, which divides the vocabulary over ranks, or scale_checkpoint."
            "checkpoint_wrapper around a module that computes projection and loss of a part of the tokens",
        ),
        "BaselineSoftmaxNllLoss": (
            "it was there to be compared with MEVO",
            'torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="sum")',
        ),
    },
    "wgit": {
        "Repo": (
            "a store of files has nothing to do with training, and it was never finished",
            "scale_snapshot for versions of a run's state, or git-lfs or dvc for files",
        ),
        "SignalSparsity": ("it was never finished", "torch.fft and torch.topk on the tensor"),
    },
}


def _module(path: str) -> ModuleType:
    """Returns the module of a path, which is found by it from now on."""
    full = f"fairscale.experimental.{path}"
    if full not in sys.modules:
        sys.modules[full] = module = ModuleType(full, "Not offered: each name says why, and what to write.")
        module.__path__ = []  # It may have modules inside.
        module.__spec__ = ModuleSpec(full, None, is_package=True)
    return sys.modules[full]


for _path, _names in NOT_OFFERED.items():
    _package = _path.removeprefix("nn.").partition(".")[0]
    _modules = [_module(_path), _module(_path[: _path.index(_package) + len(_package)])]
    for _name, (_why, _instead) in _names.items():
        _attributes = {"why": _why, "instead": _instead, "__module__": _modules[0].__name__}
        _refused = type(_name, (Refused, nn.Module), _attributes)
        for _module_of in _modules:
            setattr(_module_of, _name, _refused)
    if _modules[0] is not _modules[1]:
        setattr(_modules[1], _path.rpartition(".")[2], _modules[0])

_module("nn.mevo").MemoryEfficientVocabOutput = _module("nn.mevo").MEVO  # type: ignore[attr-defined]
ampnet_pipe, distributed_pipeline, mevo, wgit = map(
    _module, ("nn.ampnet_pipe", "nn.distributed_pipeline", "nn.mevo", "wgit")
)
