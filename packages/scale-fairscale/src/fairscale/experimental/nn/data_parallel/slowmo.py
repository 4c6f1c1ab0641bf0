"""`SlowMoDistributedDataParallel`: FairScale's arguments on scale-oss's `LocalSGD`."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fairscale._warnings import refuse, warn_argument
from scale_core.comm.collectives import all_reduce, broadcast
from scale_core.comm.group import Group, group_of
from scale_core.hooks.autograd import weak_hook
from scale_oss import LocalSGD, LocalSGDOptions


class SlowMoBaseAlgorithm(enum.Enum):
    """What ranks do between two slow steps."""

    LOCALSGD = enum.auto()
    SGP = enum.auto()


# FairScale's arguments that tuned its own machinery, and their defaults there.
_WITHOUT_EFFECT = {
    "slowmo_memory_efficient": True,
    "slowmo_num_shards": 32,
    "graph": None,
    "mixing": None,
    "push_sum": True,
    "overlap": False,
    "synch_freq": 0,
    "use_streams": True,
    "slowmo_sgp_average_params": False,
    "verbose": False,
    "profile_mode": False,
    "process_rank": None,
    "process_world_size": None,
    "global_group": None,
    "master_group": None,
    "local_node_group": None,
    "comm_device": None,
}


class SlowMoDistributedDataParallel(nn.Module):
    """Lets each node train on its own, and averages the nodes, with momentum in the slow steps.

    In new code: `LocalSGD.slowmo(model, optimizer, sync_every=...)` of scale-oss, whose slow step averages as well.

    Args:
        module: The model; its values on the first rank are sent to all.
        nprocs_per_node: How many ranks share a node; gradients are averaged between them in every step.
        broadcast_buffers: As in FairScale.
        slowmo_base_algorithm: `SlowMoBaseAlgorithm.LOCALSGD`.
        slowmo_momentum: Of the slow step; there is none where this is 0 and `slowmo_lr` is 1.
        slowmo_memory_efficient: Without effect: the state of slow steps is sharded, and these average.
        slowmo_frequency: After how many steps a slow step comes, which averages the nodes as well.
        slowmo_lr: Of the slow step.
        slowmo_num_shards: Without effect.
        localsgd_frequency: After how many steps the nodes are averaged.
        **tuning: FairScale's other arguments, without effect.

    Raises:
        NotImplementedError: Gossip (SGP), or with `slowmo_memory_efficient=False` slow steps that are none of the
            averages.
        TypeError: An unknown argument.
    """

    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
        **tuning: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(tuning.keys() - _WITHOUT_EFFECT.keys()):
            raise TypeError(f"SlowMoDistributedDataParallel: unexpected argument {unknown[0]!r}")
        if slowmo_base_algorithm is not SlowMoBaseAlgorithm.LOCALSGD:
            refuse(
                "SlowMoBaseAlgorithm.SGP",
                "gossip leaves the ranks with different parameters, whose average is only approached",
                "SlowMoBaseAlgorithm.LOCALSGD",
            )
        self.nprocs_per_node, self.broadcast_buffers = nprocs_per_node, broadcast_buffers
        self.slowmo_momentum, self.slowmo_frequency, self.slowmo_lr = slowmo_momentum, slowmo_frequency, slowmo_lr
        self.localsgd_frequency = localsgd_frequency
        self.slowmo = slowmo_lr != 1 or slowmo_momentum != 0
        num_nodes = dist.get_world_size() // nprocs_per_node if dist.is_initialized() else 1
        if self.slowmo and not slowmo_memory_efficient and num_nodes > 1 and slowmo_frequency % localsgd_frequency:
            refuse(
                f"slowmo_memory_efficient=False with slowmo_frequency={slowmo_frequency} and "
                f"localsgd_frequency={localsgd_frequency}",
                "nodes would take slow steps, each of its own, from parameters that are not averaged",
                "slowmo_memory_efficient=True, whose slow step averages",
            )
        legacy_options = {
            "slowmo_memory_efficient": slowmo_memory_efficient,
            "slowmo_num_shards": slowmo_num_shards,
            **tuning,
        }
        for name, value in legacy_options.items():
            if value != _WITHOUT_EFFECT[name]:
                warn_argument("SlowMoDistributedDataParallel", name, "has no effect, leave it out")
        within, self._nodes = _node_groups(nprocs_per_node)
        self.module: nn.Module = module
        self._within: list[DistributedDataParallel] = []  # In a list, so that names have one step.
        if within is not None and dist.get_world_size(within) > 1:
            options: Any = {} if broadcast_buffers else {"broadcast_buffers": False}  # torch warns of it.
            self._within = [DistributedDataParallel(module, process_group=within, **options)]
        for tensor in (*module.parameters(), *module.buffers()):
            broadcast(tensor.data, self._nodes).wait()
        self._local_sgd: LocalSGD | None = None
        self._num_steps = 0
        # torch holds it for all optimizers; it must not keep a module that is gone.
        self._hook: RemovableHandle = register_optimizer_step_pre_hook(weak_hook(self._before_first_step))
        weakref.finalize(self, self._hook.remove)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; its gradients are averaged within the node."""
        return (self._within[0] if self._within else self.module)(*args, **kwargs)

    def _before_first_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Finds the optimizer of these parameters, before any rank has moved."""
        module_params = {id(param) for param in self.module.parameters()}
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if self._local_sgd is None and module_params & stepped and self.slowmo:
            self._local_sgd = LocalSGD.slowmo(
                self.module,
                optimizer,
                sync_every=self.slowmo_frequency,
                outer_lr=self.slowmo_lr,
                outer_momentum=self.slowmo_momentum,
                process_group=self._nodes,
                options=LocalSGDOptions(broadcast_buffers=self.broadcast_buffers),
            )

    def _init_global_momentum_buffers(self, optimizer: Optimizer) -> None:
        """Takes the parameters as they are for the start of the slow steps, as the first step does by itself."""
        self._before_first_step(optimizer)

    @torch.no_grad()
    def perform_slowmo(self, optimizer: Optimizer, fp32_params: Sequence[Tensor] | None = None) -> None:
        """Averages the nodes if it is time for it; all ranks call it after each `optimizer.step()`.

        The slow step itself is part of the `optimizer.step()` that it falls on.

        Args:
            optimizer: The one that has stepped.
            fp32_params: Refused.

        Raises:
            NotImplementedError: `fp32_params`, or an optimizer of other parameters than the module's.
        """
        self._hook.remove()
        if fp32_params is not None or (self.slowmo and self._local_sgd is None):
            refuse(
                "perform_slowmo() with an optimizer of copies of the parameters",
                "the slow step changes the parameters that the optimizer steps on",
                "an optimizer of the module's own parameters, in fp32 or bf16, with torch.autocast for the computation",
            )
        self._num_steps += 1
        is_slow_step = self._local_sgd is not None and self._num_steps % self.slowmo_frequency == 0
        if self._num_steps % self.localsgd_frequency == 0 and not is_slow_step:
            for param in self.module.parameters():
                if param.requires_grad:
                    param.copy_(all_reduce(param.detach().clone(), self._nodes).wait() / self._nodes.size)


def _node_groups(nprocs_per_node: int) -> tuple[dist.ProcessGroup | None, Group]:
    """The ranks of this rank's node, and those that have its place in the other nodes."""
    if not dist.is_initialized():
        return None, Group()
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % nprocs_per_node:
        raise ValueError(f"nprocs_per_node={nprocs_per_node} does not divide the {world} ranks")
    nodes = [list(range(first, first + nprocs_per_node)) for first in range(0, world, nprocs_per_node)]
    within = [dist.new_group(node) for node in nodes]
    across = [dist.new_group(list(ranks)) for ranks in zip(*nodes, strict=True)]
    return within[rank // nprocs_per_node], group_of(across[rank % nprocs_per_node])


__all__ = ["SlowMoBaseAlgorithm", "SlowMoDistributedDataParallel"]
