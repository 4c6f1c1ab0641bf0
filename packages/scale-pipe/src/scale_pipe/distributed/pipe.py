"""`DistributedPipe`: a model cut into stages, each on one rank of a group, run by a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from scale_core import Contract, GroupLike, group_of
from scale_core.comm.collectives import HOST
from scale_core.comm.group import check_not_forgotten
from scale_core.consistency.contract import next_number
from scale_core.microbatch_grads import announces_samples
from scale_core.optim.clip_grad import clip, measured_gradients
from scale_core.shard import mark_stages
from scale_pipe.batch_norm import DeferredBatchNorm
from scale_pipe.distributed.build import connections, cut_in_stages, described, stages_each
from scale_pipe.distributed.comm.messages import Pass
from scale_pipe.distributed.data_parallel import check_apart
from scale_pipe.distributed.errors import Verdict, of_error
from scale_pipe.distributed.microbatch_grads import Samples, ranks_with_parameters
from scale_pipe.distributed.module_view import PlainFace
from scale_pipe.distributed.profile import costs_of, gathered_spans, link_times, measured, solved
from scale_pipe.distributed.program.channels import traffic_of
from scale_pipe.distributed.shared_params import Shared, Tied
from scale_pipe.distributed.stage import Stage
from scale_pipe.distributed.state_dict import StagesState
from scale_pipe.distributed.step_inputs import Asked, Given, LossFunction, Optimizers, given_for
from scale_pipe.distributed.step_loop import Passes, kept_gradients
from scale_pipe.microbatch import Arguments
from scale_pipe.partition.partition import Checkpoint, check_checkpoint
from scale_pipe.schedules.registry import SOLVE, schedule_for
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation, TimedAction

_MEASURED_STEP = 2  # The first one is slower than all that follow.


class DistributedPipe(PlainFace):
    """A pipeline over the ranks of a group: each holds some stages of the model, and follows its list of the schedule.

    Every rank builds the same model and the same pipeline, and calls `step` for each batch.

        pipe = DistributedPipe(nn.Sequential(...), "1f1b", balance=[3, 2], chunks=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for batch, target in batches:
            loss = pipe.step(batch, target=target, loss_fn=nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    A step equals plain PyTorch that accumulates the gradients of the same micro-batches. Each counts as many samples as
    it has, so the loss function gives a mean over samples.

    Args:
        module: An `nn.Sequential`, or the stages that `split(model, [...])` returns; only those of this rank are kept.
        schedule: A name ("1f1b", "zb_v", ...), a `Schedule`, or "solve": the second step and the links are measured,
            and the following steps run by the schedule that the solver finds for these times.
        balance: How many layers each stage has, of a sequence.
        chunks: The most micro-batches of a step; a `Schedule` has its own number.
        stages_per_rank: For schedules that leave it open.
        group: The ranks, in the order of the stages: a process group or a `DeviceMesh` of one dimension; None for all.
        device: Where the stages of this rank are moved; None leaves them where they are. On the meta device they stay:
            give this rank's stages memory and values before the first step.
        checkpoint: For which micro-batches activations are computed again in the backward pass.
        deferred_batch_norm: Batch norms move their running statistics once per step, by those of the whole batch.
        memory_cap: Of "solve": live micro-batches on a rank, in model equivalents.
        limit_seconds: The longest wait for another rank; None is the group's own limit, at most ten minutes.

    Raises:
        TypeError: The module or the schedule is none.
        ValueError: Numbers do not fit each other: the message says which.
        RuntimeError: A launcher has started several ranks, and torch.distributed is not initialised.
        ContractError: The ranks have built different models, splits or schedules.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule = "1f1b",
        *,
        balance: Sequence[int] | None = None,
        chunks: int = 8,
        stages_per_rank: int | None = None,
        group: GroupLike = None,
        device: torch.device | str | int | None = None,
        checkpoint: Checkpoint = "never",
        deferred_batch_norm: bool = False,
        memory_cap: float | Sequence[float] | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint)
        if group is None:
            check_not_forgotten()
        self.group = group_of(group)
        self.checkpoint: Checkpoint = checkpoint
        stages_per_rank = stages_per_rank or stages_each(module, self.group.size, balance)
        self._schedule = schedule_for(schedule, self.group.size, chunks, stages_per_rank)
        self._to_be_solved = isinstance(schedule, str) and schedule.lower() == SOLVE
        if memory_cap is not None and not self._to_be_solved:
            raise ValueError(
                f'memory_cap={memory_cap} is for schedule="solve", and {self._schedule.name} does not look at it: take '
                '"solve", or "v_half" or "v_min", which need less memory'
            )
        self._memory_cap = memory_cap
        stages = cut_in_stages(module, self._schedule.num_stages, balance)
        placement = self._schedule.placement
        self._wiring, self._skip_keys, tied = connections(stages, placement)
        self._state = StagesState(stages, self.group)
        self._contract = Contract(self.group, limit_seconds)
        self._passes = Passes(self.group, self._contract.limit_seconds)
        self._contract.agree("how the pipeline is built", list(described(self._schedule, stages, self._wiring)))
        for index in placement.stages_of[self.group.rank]:
            stage = stages[index]
            if device is not None and not any(param.is_meta for param in stage.parameters()):
                stage = stage.to(device)
            if deferred_batch_norm:
                stage = DeferredBatchNorm.convert_deferred_batch_norm(stage, self._schedule.num_micro_batches)
            self._hold(index, stage)
        self._tied = Tied(tied, self.stages)
        self._runners: dict[int, Stage] = {}
        self._are_new = True  # The stages, as they are wrapped now.
        self._number = next_number("the number of a pipeline", self._contract)
        self._num_steps = 0
        self._wished = HOST if device is None else torch.device(device)
        self._prepare()
        announces_samples(self, self.group, ranks_with_parameters(stages, placement, self.group))
        self._shared = Shared(self._wiring.shared, placement, self.group.rank, self._tied.now(self, self.stages))
        self._shared.make_equal(self._traffic.host_links, placement, self.group.rank)
        mark_stages(self)

    # What it is made of.

    @property
    def schedule(self) -> Schedule:
        """What runs now."""
        return self._schedule

    @property
    def chunks(self) -> int:
        """The most micro-batches of a step."""
        return self._schedule.num_micro_batches

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        params = (param for module in self.stages.values() for param in module.parameters())
        return next((param.device for param in params if not param.is_meta), self._wished)

    def _prepare(self) -> None:
        """Makes all that follows from the schedule."""
        self._device = self.device
        self._traffic = traffic_of(
            self._schedule,
            self._wiring,
            self.group,
            number=self._number,
            device=self._device,
            limit_seconds=self._contract.limit_seconds,
        )

    # Steps.

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A pipeline is not called: its backward is a part of its step."""
        raise RuntimeError(
            "a DistributedPipe computes the loss and its gradients in one: write loss = pipe.step(batch, "
            "target=target, loss_fn=loss_fn), or output = pipe.evaluate(batch) without gradients"
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        optimizer: Optimizers | None = None,
        stage_inputs: Mapping[int, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs a batch through the pipeline and back; gradients are added to `param.grad` of this rank's stages.

        Args:
            args: Of the first stage; tensors [N, ...] in any nesting. Ranks without it may leave them out.
            target: Of the loss function, tensors [N, ...] in any nesting; needed on the rank of the last stage.
            loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` without a target: the mean over the samples of a
                micro-batch. None where the last stage returns that itself.
            optimizer: Steps each stage as soon as its gradients are there, or where gradients are measured, as by
                AdaScale, when all ranks are through; one for all stages of this rank, or one for each by its number.
                None leaves it to the caller, who may clip gradients before.
            stage_inputs: By the number of a stage, arguments by keyword that it gets on its own rank.
            kwargs: Of the first stage, by keyword; one that has a name from above is given as `stage_inputs={0: ...}`.

        Returns:
            The mean loss of the batch: a scalar without history, the same on all ranks.

        Raises:
            StageError: A stage has failed, or was given what it can't take; on all ranks alike. Gradients are as before
                the step, and training can go on.
            ScaleDistributedError: The ranks have lost each other.
        """
        asked = Asked(Arguments(args, kwargs), target, loss_fn, stage_inputs or {}, optimizer)
        self._begin(Pass.STEP)
        # In whatever mode a step is called it computes gradients, and such as can be used outside of inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            given = given_for(asked, Pass.STEP, self._schedule, self.group.rank, self._device)
            samples = Samples(self._wiring.shared, self._schedule.placement, self.group.rank)
            with kept_gradients(self.stages.values(), self._runners), samples:
                given = self._checked(given._replace(samples=samples), samples)
                self._shared.begin()
                _, verdict = self._run(given)
            loss = verdict.loss_on(self._device)
            assert loss is not None
        self._num_steps += 1
        if self._to_be_solved and self._num_steps >= _MEASURED_STEP:
            self._solve()
        return loss

    @torch.no_grad()
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        with_output: bool = False,
        stage_inputs: Mapping[int, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a batch forward alone, in the mode that the modules are in (`pipe.eval()`).

            output = pipe.evaluate(batch)
            loss = pipe.evaluate(batch, target=target, loss_fn=loss_fn)

        Args:
            args: As in `step`.
            target: As in `step`.
            loss_fn: As in `step`. Where the last stage returns the loss itself: `loss_fn=lambda loss: loss`.
            with_output: Beside a loss, the output as well; otherwise that is not kept.
            stage_inputs: As in `step`.
            kwargs: As in `step`.

        Returns:
            Where the rank of the last stage is given a target or a loss function, the mean loss as `step` has it, a
            scalar, the same on all ranks; with `with_output` a tuple of the loss and the output. Without them the
            output. The output is that of the whole batch on the rank of the last stage, and None on the others.

        Raises:
            StageError: As in `step`.
            ScaleDistributedError: As in `step`.
        """
        asked = Asked(Arguments(args, kwargs), target, loss_fn, stage_inputs or {}, with_output=with_output)
        self._begin(Pass.EVALUATION)
        output, verdict = self._run(given_for(asked, Pass.EVALUATION, self._schedule, self.group.rank, self._device))
        loss = verdict.loss_on(self._device)
        return output if loss is None else (loss, output) if with_output else loss

    def _run(self, given: Given) -> tuple[Any, Verdict]:
        run, verdict = self._passes.run(self._traffic, self._runners, given, self._shared)
        return run.output, verdict

    def _begin(self, kind: Pass) -> None:
        self._passes.begin(kind)
        if self._shared.is_unequal:
            self._shared.look_again(self._tied.now(self, self.stages))
            self._shared.make_equal(self._traffic.host_links, self._schedule.placement, self.group.rank)
        device = self.device
        if device != self._device:
            self._device = device
            self._traffic.compute_on(device)
        for index, module in self.stages.items():
            known = self._runners.get(index)
            if known is None or known.module is not module:
                self._are_new = True
                pops, stashes = self._keys(index, pops=True), self._keys(index, pops=False)
                self._runners[index] = Stage(index, module, pops, stashes, self.checkpoint)

    def _checked(self, given: Given, samples: Samples) -> Given:
        """Looks at wrappers and shared parameters again, and announces the step; an error fails it on all ranks."""
        try:
            if self._are_new:
                check_apart(self.stages)
                self._are_new = False
            tied = self._tied.now(self, self.stages)
            self._shared.look_again(tied)
            for runner in self._runners.values():
                runner.shared = [param for param, _ in tied.values()]
            samples.begin(self.stages, {name: param for name, (param, _) in tied.items()})
        except Exception as error:
            words = "what its stages are wrapped in, or measured by"
            return given._replace(
                failure=of_error(error, rank=self.group.rank, stage=min(self.stages), micro_batch=-1, doing=words),
                cause=error,
            )
        return given

    def _keys(self, index: int, *, pops: bool) -> dict[str, Any]:
        skips = self._wiring.skips
        return {
            skip.name: self._skip_keys[skip.name] for skip in skips if index == (skip.target if pops else skip.source)
        }

    # Measured and solved.

    @property
    def last_trace(self) -> tuple[TimedAction, ...]:
        """What this rank has computed in its last pass, in seconds from its begin."""
        return () if self._passes.last is None else self._passes.last[0]

    def measured(self) -> Simulation:
        """Returns the last pass of all ranks, to be drawn beside the plan; all ranks call it together.

            save_drawing([simulate(pipe.schedule, measured.costs), measured], "step.svg")

        Raises:
            RuntimeError: There was none.
            TransferError: A rank did not come.
        """
        if self._passes.last is None:
            raise RuntimeError("there is nothing measured before the first step: call pipe.step(...) first")
        spans, began = self._passes.last
        return measured(self._schedule, gathered_spans(spans, self.group, began, self._contract.limit_seconds))

    def _solve(self) -> None:
        self._to_be_solved = False
        spans = self.measured().spans
        limit, traffic = self._contract.limit_seconds, self._traffic
        link = link_times(self._schedule.placement, traffic.links, traffic.probes, self.group, limit)
        costs = costs_of(spans, self._schedule.num_stages, link)
        self._schedule = solved(self._schedule, costs, self.group, self._memory_cap, limit)
        self._prepare()

    # State.

    def state_dict(  # type: ignore[override]  # torch overloads it
        self, *args: Any, full: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns what this rank holds, by the names of the plain model.

        Args:
            args: `destination`, `prefix`, `keep_vars`, as torch has them.
            full: The whole model, in its order of names, on the host of the first rank, and nothing on the others; all
                ranks call it together, with those that divide a stage's layers or shard it.
            kwargs: Likewise.
        """
        own = super().state_dict(*args, **kwargs)
        links, placement = self._traffic.host_links, self._schedule.placement
        return self._state.whole(own, links, placement) if full else own

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients of all stages so that their norm is at most `max_norm`; all ranks call it together.

        Args:
            max_norm: The largest norm allowed; `math.inf` only measures.
            norm_type: p > 0; `math.inf` is the largest magnitude. A parameter that several stages share counts once.

        Returns:
            The norm before, a scalar, equal on all ranks.

        Raises:
            ValueError: One of the two is no such number.
            TransferError: A rank did not come.
        """
        gradients = measured_gradients(list(self.parameters()))
        return clip(gradients, float(max_norm), float(norm_type), self._contract.limit_seconds, [self])

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Returns those of this rank's parameters that another stage shares, whose rank counts them in a norm."""
        return self._shared.counted_elsewhere()
