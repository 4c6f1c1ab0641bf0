"""What people write around a fit: under each strategy as under Lightning's own ddp, on as many ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning_models import Block, Net, loader, trainer
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import ShardedEMA, class_policy
from scale_lightning import ScaleFSDPStrategy, ScaleOSSStrategy, ScaleShardedDDPStrategy

pytestmark = [  # What Lightning says of few workers, of its own folders, and what it uses of torch that is deprecated
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]


def ddp(**options: Any) -> Any:
    return DDPStrategy(
        process_group_backend="gloo", find_unused_parameters=options.pop("find_unused_parameters", False)
    )


def fsdp(**options: Any) -> Any:
    options.pop("find_unused_parameters", None)
    return ScaleFSDPStrategy(class_policy(Block, nn.Sequential), **options)


def sharded_ddp(**options: Any) -> Any:
    options.pop("find_unused_parameters", None)
    return ScaleShardedDDPStrategy(**options)


STRATEGIES: dict[str, Callable[..., Any]] = {
    "scale_fsdp": fsdp,
    "scale_oss": ScaleOSSStrategy,
    "scale_sharded_ddp": sharded_ddp,
}


def state_of(fitted: Any, folder: str) -> dict[str, Any]:
    """The full weights, as a file has them."""
    fitted.save_checkpoint(f"{folder}/state.ckpt")
    saved = torch.load(f"{folder}/state.ckpt", weights_only=False)["state_dict"]
    return {name: tensor.double().tolist() for name, tensor in saved.items()}


def fit(**options: Any) -> Callable[[Callable[..., Any], str], Any]:
    def run(strategy: Callable[..., Any], folder: str) -> Any:
        given = {key: value() if callable(value) else value for key, value in options.items()}
        module = given.pop("module", None) or Net()
        epochs, strategy_options = given.pop("epochs", 2), given.pop("strategy_options", {})
        fitted = trainer(strategy(**strategy_options), epochs, **given)
        fitted.fit(module, loader(), loader())
        return state_of(fitted, folder), float(fitted.callback_metrics["val_loss"]), fitted.current_epoch

    return run


class Manual(Net):
    """Optimizes by itself: clips, and calls the module, as its forward is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.factor.sum()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        schedule.step()


class GAN(Net):
    """Two optimizers by turns, each with the other's parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.net, self.factor
        self.generator, self.critic = Block(), nn.Sequential(Block(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        optimizers: Any = self.optimizers()
        for optimizer, loss in (
            (optimizers[0], lambda: -self.critic(self.generator(x)).mean()),
            (optimizers[1], lambda: (self.critic(self.generator(x).detach()) - self.critic(x)).mean()),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.critic(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Adam divides by the root of what is nearly zero here: a large eps, so that rounding stays rounding.
        return [torch.optim.Adam(each.parameters(), 0.01, eps=1e-3) for each in (self.generator, self.critic)]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def keep_the_best(kind: str) -> Callable[[Callable[..., Any], str], Any]:
    def run(strategy: Callable[..., Any], folder: str) -> Any:
        options = {} if strategy is ddp else {"state_dict_type": kind}

        def keeps(name: str) -> callbacks.ModelCheckpoint:
            path = f"{folder}/{name}"
            return callbacks.ModelCheckpoint(path, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)

        best = keeps("first")
        fitted = trainer(strategy(**options), 3, enable_checkpointing=True, callbacks=[best])
        fitted.fit(Net(), loader(), loader())
        found = [sorted(os.listdir(f"{folder}/first")), Path(best.best_model_path).name, float(best.best_model_score)]
        found.append(fitted.test(dataloaders=loader(), ckpt_path="best", verbose=False))
        found.append(fitted.validate(dataloaders=loader(), ckpt_path="last", verbose=False))
        resumed = trainer(strategy(**options), 4, enable_checkpointing=True, callbacks=[keeps("second")])
        resumed.fit(Net(), loader(), loader(), ckpt_path=best.last_model_path)
        resumed.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        tester = trainer(strategy(**options))
        return *found, tester.test(Net(), loader(), ckpt_path=f"{folder}/weights.ckpt", verbose=False)

    return run


def log_rates(strategy: Callable[..., Any], folder: str) -> Any:
    logged = trainer(
        strategy(), 2, logger=CSVLogger(folder), callbacks=[callbacks.LearningRateMonitor("step")], log_every_n_steps=1
    )
    logged.fit(Net(), loader(), loader())
    if dist.get_rank():
        return ""
    # OSS stands in the place of an optimizer, and Lightning names the column after the class.
    return Path(f"{folder}/lightning_logs/version_0/metrics.csv").read_text().replace("lr-OSS", "lr-AdamW")


def fit_twice(strategy: Callable[..., Any], folder: str) -> Any:
    module, fitted = Net(), trainer(strategy(), 1)
    fitted.fit(module, loader())
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module, loader())
    again = trainer(strategy(), 1)
    again.fit(module, loader())
    return state_of(again, folder)


class Predicting(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def predict(strategy: Callable[..., Any], folder: str) -> Any:
    predicted: Any = trainer(strategy()).predict(Predicting(), loader())
    return [each.tolist() for each in predicted]


def find_a_rate(strategy: Callable[..., Any], folder: str) -> Any:
    module: Any = Net()
    module.lr = 0.05
    found: Any = Tuner(trainer(strategy())).lr_find(module, loader(), num_training=5, min_lr=1e-4, max_lr=1e-2)
    return found.results


FEATURES: dict[str, Callable[[Callable[..., Any], str], Any]] = {
    "16-mixed": fit(precision="16-mixed"),  # On a CPU Lightning takes bf16.
    "bf16-true": fit(precision="bf16-true"),
    "64-true": fit(precision="64-true"),
    "clipped by value": fit(gradient_clip_val=0.1, gradient_clip_algorithm="value", accumulate_grad_batches=2),
    "accumulated, with a rest": fit(accumulate_grad_batches=3),
    "accumulated by epoch": fit(callbacks=lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]),
    "few validation batches": fit(limit_val_batches=1, val_check_interval=1),
    "a sampler of its own": fit(use_distributed_sampler=False),
    "anomalies, profiler": fit(detect_anomaly=True, profiler="simple"),
    "stopped early": fit(epochs=9, callbacks=lambda: [callbacks.EarlyStopping("val_loss", patience=1, min_delta=1e3)]),
    "plateau": fit(module=Plateau, epochs=3),
    "manual": fit(module=Manual),
    "two optimizers": fit(module=GAN, strategy_options={"find_unused_parameters": True}),
    "the best is kept": keep_the_best("full"),
    "the best is kept, in folders": keep_the_best("sharded"),
    "rates": log_rates,
    "a rate is looked for": find_a_rate,
    "fitted twice": fit_twice,
    "predicted": predict,
}
NOT_BY_ITSELF = {"manual", "two optimizers"}  # What ShardedDataParallel refuses


# Sums of gradients in bf16 are rounded: DDP adds in the order of a ring, ours in that of the ranks. Of two it is one.
OF_TWO_RANKS = {"bf16-true"}


def play(folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, feature in FEATURES.items():
        if name in OF_TWO_RANKS and torch.distributed.get_world_size() > 2:
            continue
        for strategy in ["ddp", *names]:
            if strategy == "scale_sharded_ddp" and name in NOT_BY_ITSELF:
                continue
            place = f"{folder}/{name}/{strategy}"
            os.makedirs(place, exist_ok=True)
            found.setdefault(name, {})[strategy] = feature({"ddp": ddp, **STRATEGIES}[strategy], place)
    return found


def flat(value: Any) -> list[Any]:
    """The numbers and words of nested containers, in order."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in (key, *flat(each))]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_written_around_a_fit_works_as_under_ddp(name: str, num_ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(play, num_ranks, str(tmp_path), [name], limit_seconds=600):
        assert found.keys() == FEATURES.keys() - (OF_TWO_RANKS if num_ranks > 2 else set())
        for feature, by_strategy in found.items():
            if name in by_strategy:
                words = [[leaf for leaf in flat(each) if not isinstance(leaf, float)] for each in by_strategy.values()]
                numbers = [[leaf for leaf in flat(each) if isinstance(leaf, float)] for each in by_strategy.values()]
                assert words[0] == words[1], feature
                assert numbers[1] == pytest.approx(numbers[0], rel=2e-5, abs=2e-6), feature


class Unfreezing(callbacks.BaseFinetuning):
    """Trains the first block from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.get_submodule("net.0"))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.get_submodule("net.0"), optimizer, lr=0.01)


class Finetuned(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=0.05)


class Averaging(Callback):
    """The average that the guide shows."""

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.average = ShardedEMA(pl_module, decay=0.5)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        self.average.update()

    def on_validation_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.swapped = self.average.swapped()
        self.swapped.__enter__()

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.swapped.__exit__(None, None, None)


def fit_with_callbacks(folder: str) -> list[str]:
    wrong, states, losses = [], {}, {}
    for name in ("scale_fsdp", "scale_sharded_ddp"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        fitted = trainer(STRATEGIES[name](), 2, callbacks=[Unfreezing()])
        fitted.fit(Finetuned(), loader())
        states[name] = state_of(fitted, f"{folder}/{name}")
        averaged = trainer(STRATEGIES[name](), 2, callbacks=[Averaging()], num_sanity_val_steps=0)
        averaged.fit(Net(), loader(), loader())
        losses[name] = float(averaged.callback_metrics["val_loss"])
    plain = trainer(ddp(), 2, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)], num_sanity_val_steps=0)
    plain.fit(Net(), loader(), loader())
    losses["ddp"] = float(plain.callback_metrics["val_loss"])
    ours, theirs = ([leaf for leaf in flat(state) if isinstance(leaf, float)] for state in states.values())
    if ours != pytest.approx(theirs, rel=1e-5, abs=1e-6):
        wrong.append(f"finetuned: {states}")
    if [*losses.values()] != pytest.approx([losses["ddp"]] * 3, rel=1e-5):
        wrong.append(f"averaged: {losses}")
    for strategy, callback, message in (
        (ScaleOSSStrategy(), Unfreezing(), "'net.0.inner.weight' was frozen when DistributedDataParallel was built"),
        (fsdp(), callbacks.EMAWeightAveraging(), "EMAWeightAveraging copies the model before it is sharded"),
        (fsdp(), callbacks.StochasticWeightAveraging(0.01), "StochasticWeightAveraging copies the model before"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(strategy, 2, callbacks=[callback]).fit(Finetuned(), loader())
    return wrong


# Lightning compares parameters by their values, and takes the empty shards of a rank for one parameter.
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning")
def test_callbacks_that_change_the_model_work_or_are_refused(tmp_path: Path) -> None:
    assert run_ranks(fit_with_callbacks, 2, str(tmp_path)) == [[], []]
