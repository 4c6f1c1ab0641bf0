"""How each library wraps a model, and what it calls for a step: one class for each that `scale-check fuzz` knows.

A class says in `can` what its programs may have: "units" (modules that are sharded by themselves), "unused" (parameters
without a gradient), "tied" (parameters that two modules share), "freeze" (parameters that stop to train), "clip", and
"float64". The libraries are those that are installed; this package depends on none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[..., Optimizer]
"""Called with the optimizer's class, parameters and further options."""


class FuzzEngine:
    """Plain PyTorch in one process."""

    can: ClassVar[frozenset[str]] = frozenset({"clip", "float64"})
    accumulates_without_sync: ClassVar[bool] = False  # It can't in another way.
    library: ClassVar[str] = "torch"  # The module that it imports.

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Returns the wrapped model and its optimizer."""
        return model, make_optimizer(kind, model.parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context in which gradients are only accumulated."""
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        """Computes gradients."""
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        """Clips the gradients to a norm."""
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def scheduler(self, kind: Callable[..., Any], optimizer: Optimizer, **options: Any) -> Any:
        """Builds a scheduler of the learning rates."""
        return kind(optimizer, **options)

    def step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Updates the parameters."""
        optimizer.step()

    def zero_grad(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clears the gradients."""
        optimizer.zero_grad()


class DDP(FuzzEngine):
    """torch's DistributedDataParallel, which looks for unused parameters."""

    can = FuzzEngine.can | {"unused", "tied"}

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        return wrapped, make_optimizer(kind, wrapped.parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        return model.no_sync()


class ZeRO1(DDP):
    """torch's ZeroRedundancyOptimizer beside DDP."""

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped, _ = super().wrap(model, units, make_optimizer, kind)
        return wrapped, make_optimizer(ZeroRedundancyOptimizer, wrapped.parameters(), optimizer_class=kind)


class FSDP2(FuzzEngine):
    """torch's fully_shard, over some modules and the model."""

    can = FuzzEngine.can | {"units", "unused", "freeze"}
    fully_shard_module: ClassVar[str] = "torch.distributed.fsdp"

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        fully_shard = importlib.import_module(self.fully_shard_module).fully_shard

        for name in sorted(units, key=lambda name: -name.count(".")):
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        return model, make_optimizer(kind, model.parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        return _WithoutGradientSync(model)


class _WithoutGradientSync(AbstractContextManager[None]):
    """FSDP2 has a switch in place of a context."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._model.set_requires_gradient_sync(True)


class Accelerate(FuzzEngine):
    """Accelerator.prepare, which wraps a model in DDP."""

    can = FuzzEngine.can | {"unused", "tied"}
    library = "accelerate"

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        accelerate = importlib.import_module("accelerate")
        _set_variables()  # Without them it trains alone, whatever torch.distributed says.
        self._accelerator = accelerate.Accelerator(
            cpu=True, kwargs_handlers=[accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        model, optimizer = self._accelerator.prepare(model, make_optimizer(kind, model.parameters()))
        return model, optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._accelerator.no_sync(model)
        return context

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        self._accelerator.clip_grad_norm_(model.parameters(), max_norm)

    def scheduler(self, kind: Callable[..., Any], optimizer: Optimizer, **options: Any) -> Any:
        return self._accelerator.prepare(kind(optimizer, **options))


class DeepSpeed1(FuzzEngine):
    """DeepSpeed's ZeRO-1 in float32; its clipping is an option of the whole training, and is left out."""

    can = frozenset({"unused"})
    accumulates_without_sync = True
    library = "deepspeed"
    stage: ClassVar[int] = 1

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        deepspeed = importlib.import_module("deepspeed")

        _set_variables()
        deepspeed.init_distributed("gloo")
        self._optimizer = make_optimizer(kind, model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=self._optimizer, config=config)
        engine.set_gradient_accumulation_boundary(True)
        return engine, self._optimizer

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """A pass that is not DeepSpeed's accumulation boundary; each pass has a `step`."""
        model.set_gradient_accumulation_boundary(False)
        try:
            yield
            model.step()
        finally:
            model.set_gradient_accumulation_boundary(True)

    def backward(self, model: Any, loss: Tensor) -> None:
        model.backward(loss)

    def step(self, model: Any, optimizer: Optimizer) -> None:
        model.step()

    def zero_grad(self, model: nn.Module, optimizer: Optimizer) -> None:
        pass  # Its step does.


class DeepSpeed2(DeepSpeed1):
    """DeepSpeed's ZeRO-2 in float32."""

    stage = 2


class DeepSpeed3(DeepSpeed1):
    """DeepSpeed's ZeRO-3 in float32."""

    stage = 3


class ScaleFSDP(FSDP2):
    """fully_shard of scale-fsdp, over some modules and the model."""

    library = fully_shard_module = "scale_fsdp"


class ScaleOSS(FuzzEngine):
    """OSS and ShardedDataParallel of scale-oss."""

    can = FuzzEngine.can | {"unused", "tied", "freeze"}
    library = "scale_oss"

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        scale_oss = importlib.import_module("scale_oss")

        def with_class(params: Iterable[Any], **options: Any) -> Optimizer:
            optimizer: Optimizer = scale_oss.OSS(params, kind, **options)
            return optimizer

        optimizer = make_optimizer(with_class, model.parameters())
        return scale_oss.ShardedDataParallel(model, optimizer), optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = model.no_sync()  # type: ignore[operator]
        return context

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        optimizer.clip_grad_norm_(max_norm)  # type: ignore[attr-defined]


ENGINES: dict[str, type[FuzzEngine]] = {
    "ddp": DDP,
    "zero1": ZeRO1,
    "fsdp2": FSDP2,
    "accelerate": Accelerate,
    "deepspeed1": DeepSpeed1,
    "deepspeed2": DeepSpeed2,
    "deepspeed3": DeepSpeed3,
    "scale-fsdp": ScaleFSDP,
    "scale-oss": ScaleOSS,
}
"""By the names that `scale-check fuzz --engine` takes."""


def _set_variables() -> None:
    """Sets the variables of a launcher."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def engine_class(name: str) -> type[FuzzEngine]:
    """Returns the class of a name in `ENGINES`, or of "module:Class", a subclass of `FuzzEngine`.

    Raises:
        ValueError: There is no such class.
        ModuleNotFoundError: Its library is not installed. Otherwise each program would raise it, without a finding.
    """
    module, colon, kind = name.partition(":")
    engine = getattr(importlib.import_module(module), kind, None) if colon else ENGINES.get(name)
    if not (isinstance(engine, type) and issubclass(engine, FuzzEngine)):
        raise ValueError(
            f"expected an engine to be one of {', '.join(ENGINES)}, or module:Class of a subclass of "
            f"scale_check.fuzz.engines.FuzzEngine, got {name}"
        )
    if importlib.util.find_spec(engine.library) is None:
        distribution = engine.library.replace("_", "-")
        raise ModuleNotFoundError(
            f"{name} trains with {engine.library}, which is not installed: pip install {distribution}"
        )
    return engine
