"""ESPnet 202511: a small model in its `Trainer`, as for `--sharded_ddp`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from espnet2.iterators.abs_iter_factory import AbsIterFactory
from espnet2.torch_utils.device_funcs import force_gatherable
from espnet2.train.abs_espnet_model import AbsESPnetModel
from espnet2.train.distributed_utils import DistributedOption
from espnet2.train.trainer import Trainer, TrainerOptions
from torch import Tensor, nn

import fairscale

way, stage = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
losses: list[float] = []


class Model(AbsESPnetModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()

    def forward(self, x: Tensor, utt_id: list[str]) -> Any:
        loss = self.net(x).square().mean()
        if self.training:
            losses.append(loss.item())
        return force_gatherable((loss, {"loss": loss.detach()}, len(x)), loss.device)

    def collect_feats(self, **batch: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError


class Batches(AbsIterFactory):
    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
        for step in range(4):
            seed = 100 * epoch + 10 * step + rank
            yield [str(seed)], {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).double()}


def options(max_epoch: int) -> TrainerOptions:
    kinds = TrainerOptions.__annotations__
    given: dict[str, Any] = {name: False if kind is bool else None for name, kind in kinds.items()} | {
        "ngpu": 0,
        "resume": True,
        "train_dtype": "float64",
        "accum_grad": 2,
        "grad_clip": 0.1,
        "grad_clip_type": 2.0,
        "seed": 0,
        "output_dir": "out",
        "max_epoch": max_epoch,
        "sharded_ddp": way == "sharded_ddp",
        "keep_nbest_models": 1,
        "nbest_averaging_interval": 0,
        "best_model_criterion": [("valid", "loss", "min")],
        "val_scheduler_criterion": ("valid", "loss"),
        "early_stopping_criterion": ("valid", "loss", "min"),
        "wandb_model_log_interval": 0,
    }
    return TrainerOptions(**given)


Path("out").mkdir(exist_ok=True)
model = Model()
optimizer: torch.optim.Optimizer  # As `espnet2.tasks.abs_task` builds it, whose import wants torchaudio.
if way == "sharded_ddp":
    optimizer = fairscale.optim.oss.OSS(params=model.parameters(), optim=torch.optim.Adam, lr=0.05)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
Trainer.run(
    model=model,
    optimizers=[optimizer],
    schedulers=[None],
    train_iter_factory=Batches(),
    valid_iter_factory=Batches(),
    plot_attention_iter_factory=None,
    trainer_options=options(2 if stage == "begin" else 3),
    distributed_option=DistributedOption(distributed=True, dist_rank=rank, dist_world_size=2, ngpu=0),
)
if rank == 0:
    weights = [value.tolist() for value in model.state_dict().values()]
    Path("result.json").write_text(json.dumps([losses, weights]))
dist.barrier()
dist.destroy_process_group()
