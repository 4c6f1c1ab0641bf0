"""ClassyVision 0.7.0: a small network on synthetic images, under DDP, its `zero` optimizer, and `use_sharded_ddp`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

# torchvision from PyPI is for CUDA: without that its operators are missing, and these two it looks for at its import.
operators = torch.library.Library("torchvision", "DEF")
for operator in ("nms(Tensor dets, Tensor scores, float threshold) -> Tensor", "qnms(Tensor dets) -> Tensor"):
    operators.define(operator)

from classy_vision.hooks import CheckpointHook, ClassyHook  # noqa: E402
from classy_vision.tasks import build_task  # noqa: E402
from classy_vision.trainer import DistributedTrainer  # noqa: E402

way, stage = sys.argv[1:]


class Losses(ClassyHook):
    on_start = on_phase_start = on_phase_end = on_end = ClassyHook._noop

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_step(self, task: Any) -> None:
        if task.train:
            self.losses.append(task.last_batch.loss.item())


def images(seed: int) -> dict[str, Any]:
    transforms = [{"name": "ToTensor"}, {"name": "Normalize", "mean": [0.5] * 3, "std": [0.25] * 3}]
    return {
        "name": "synthetic_image",
        "crop_size": 8,
        "num_samples": 32,
        "class_ratio": 0.5,
        "seed": seed,
        "batchsize_per_replica": 4,
        "use_shuffle": False,
        "transforms": [{"name": "apply_transform_to_key", "key": "input", "transforms": transforms}],
    }


sgd = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
schedules = {"param_schedulers": {"lr": {"name": "step", "values": [0.1, 0.01]}}}
torch.manual_seed(0)
task = build_task(
    {
        "name": "classification_task",
        "num_epochs": 4,
        "loss": {"name": "CrossEntropyLoss"},
        "dataset": {"train": images(0), "test": images(1)},
        "meters": {},
        "model": {"name": "mlp", "input_dim": 192, "output_dim": 2, "hidden_dims": [16, 8]},
        "optimizer": {**sgd, **schedules} if way == "ddp" else {"name": "zero", "base_optimizer": sgd, **schedules},
        "use_sharded_ddp": way == "zero and ShardedDataParallel",
        "clip_grad_norm": 0.5,
    }
)
losses = Losses()
Path("checkpoints").mkdir(exist_ok=True)
for dataset in task.datasets.values():
    dataset.set_num_workers(0)
task.set_hooks([losses, CheckpointHook("checkpoints")])
if stage == "resume":
    task.set_checkpoint("checkpoints/model_phase-2_end.torch")
DistributedTrainer().train(task)
if torch.distributed.get_rank() == 0:
    weights = [value.tolist() for value in task.base_model.state_dict().values() if value.is_floating_point()]
    Path("result.json").write_text(json.dumps([losses.losses, weights]))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
