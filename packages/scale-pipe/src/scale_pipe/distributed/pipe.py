"""`DistributedPipe`: a model cut into stages, each on one rank of a group, run by a schedule."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from scale_core import group_of
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import HOST
from scale_core.comm.group import GroupLike
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import check_interval, compare_replicas
from scale_core.consistency.flight_recorder import next_unique_id
from scale_core.errors import renamed_arguments
from scale_core.hooks.gradients import gradient_hooks
from scale_core.hooks.microbatch_grads import register_pipeline
from scale_core.optim.clip_grad import clip, measured_gradients
from scale_core.optim.step_hooks import watch_optimizers
from scale_core.shard import register_stages
from scale_pipe.batch_norm import DeferredBatchNorm
from scale_pipe.distributed.errors import failure_from_error
from scale_pipe.distributed.gradients.data_parallel import check_disjoint_wrappers
from scale_pipe.distributed.gradients.microbatch_grads import MicrobatchGrads, ranks_with_parameters
from scale_pipe.distributed.gradients.param_hooks import hooks_called_once
from scale_pipe.distributed.gradients.shared_params import SharedParams
from scale_pipe.distributed.module_view import ModelFQNs, StageModuleView, check_stage_memory
from scale_pipe.distributed.options import PipelineOptions
from scale_pipe.distributed.profile import (
    costs_from_spans,
    gather_spans,
    local_spans,
    measure_link_times,
    solve_on_first_rank,
)
from scale_pipe.distributed.program import (
    StepKind,
    build_channels,
    find_connections,
    fingerprint_lines,
    infer_stages_per_rank,
    split_into_stages,
)
from scale_pipe.distributed.runtime import PassRuntime, StepInputs
from scale_pipe.distributed.stage import Stage
from scale_pipe.distributed.step import (
    LossFunction,
    Optimizers,
    StepArgs,
    StepLoop,
    prepare_inputs,
    restore_grads_on_error,
)
from scale_pipe.microbatch import Arguments
from scale_pipe.partition.partition_function import Checkpoint, check_checkpoint
from scale_pipe.schedules.action import TimedAction
from scale_pipe.schedules.registry import SOLVE, get_schedule
from scale_pipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from scale_pipe.schedules.simulation import ScheduleSimulation

_logger = logging.getLogger(__name__)

_MEASURED_STEP = 2  # The first one is slower than all that follow.


class DistributedPipe(StageModuleView):
    """A pipeline over the ranks of a group: each holds some stages of the model, and runs its actions of the schedule.

    Every rank builds the same model and the same pipeline, and calls `step` for each batch.

        pipe = DistributedPipe(nn.Sequential(...), "1f1b", balance=[3, 2], chunks=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for batch, target in batches:
            loss = pipe.step(batch, target=target, loss_fn=nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    A step equals plain PyTorch on the batch. Each micro-batch counts by its number of samples. So the loss function
    must return a mean over samples, or over the targets that count, for example with `ignore_index`.

    Args:
        module: An `nn.Sequential`, or the stages that `split(model, [...])` returns; a rank keeps only its own.
        schedule: A name ("1f1b", "zb_v", ...), a `Schedule`, or "solve". With "solve" we measure the second step and
            the links, and the next steps run the schedule that the solver finds for these times.
        balance: The number of layers of each stage, for a sequence.
        chunks: The most micro-batches of a step; a `Schedule` has its own number.
        process_group: The ranks, in the order of the stages: a `ProcessGroup`, a `DeviceMesh` axis, or the `pp` axis of
            a `ParallelDims`. None is all ranks.
        device: The device to which the stages of this rank are moved; None leaves them where they are. Stages on the
            meta device stay there: give this rank's stages memory and values before the first step.
        checkpoint: "never", "always" or "except_last": the micro-batches whose activations are recomputed in the
            backward pass.
        options: A `PipelineOptions`: stages on a rank, batch norms, the memory of "solve", and waits for other ranks.

    Raises:
        TypeError: The module is neither a sequence nor a list of stages, or the schedule is not a schedule.
        ValueError: Numbers do not fit each other.
        RuntimeError: A launcher has started several ranks, and torch.distributed is not initialized.
        ContractError: The ranks have built different models, splits or schedules.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_pipe import DistributedPipe
        >>> layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        >>> pipe = DistributedPipe(layers, "1f1b", balance=[3], chunks=4)  # one stage on one rank
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> loss = pipe.step(torch.randn(16, 8), target=torch.randn(16, 4), loss_fn=nn.functional.mse_loss)
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    @checked_arguments(own="module")
    @renamed_arguments(
        **{field.name: f"options=PipelineOptions({field.name}=...)" for field in fields(PipelineOptions)}
    )
    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        schedule: str | Schedule = "1f1b",
        *,
        balance: Sequence[int] | None = None,
        chunks: int = 8,
        process_group: GroupLike = None,
        device: torch.device | str | int | None = None,
        checkpoint: Checkpoint = "never",
        options: PipelineOptions | None = None,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint)
        options = options or PipelineOptions()
        self.group = group_of(process_group, "pp")
        self.checkpoint: Checkpoint = checkpoint
        stages_per_rank = options.stages_per_rank or infer_stages_per_rank(module, self.group.size, balance)
        self._schedule = get_schedule(schedule, self.group.size, chunks, stages_per_rank)
        self._solve_pending = isinstance(schedule, str) and schedule.lower() == SOLVE
        self._steps_until_solve = _MEASURED_STEP
        self._memory_cap = self._checked_memory_cap(options.memory_cap)
        stages = split_into_stages(module, self._schedule.num_stages, balance)
        placement = self._schedule.placement
        self._cross_stage, shared_names = find_connections(stages, placement)
        check_stage_memory(stages, placement)
        self._fqns = ModelFQNs(stages)
        self._contract = Contract(self.group, options.limit_seconds)
        self._limit = self._contract.limit_seconds
        self._loop = StepLoop(self._contract)
        lines = fingerprint_lines(self._schedule, stages, self._cross_stage)
        self._contract.check_equal("how the pipeline is built", list(lines))
        for index in placement.stages_of[self.group.rank]:
            self._add_stage(index, self._prepared(stages[index], device, options.deferred_batch_norm))
        self._runners: dict[int, Stage] = {}
        self._wrappers_changed = True
        self._pipeline_id = next_unique_id("DistributedPipe", self.group)
        self._requested_device = HOST if device is None else torch.device(device)
        self._build_channels()
        register_pipeline(self, self.group, ranks_with_parameters(stages, placement, self.group))
        shared = self._cross_stage.shared
        self._grads = MicrobatchGrads(shared, placement, self.group.rank)
        self._shared = SharedParams(shared, shared_names, placement, self.group.rank, self)
        self._shared.broadcast_values(self._channels.host, placement, self.group.rank)
        self._check_every = check_interval(options.check_replicas_every) if shared else 0
        self.recorded_steps = self._loop.recorded_steps
        register_stages(self)
        watch_optimizers()
        if self.group.rank == 0:
            _logger.info(
                "DistributedPipe: %d stages on %d ranks (stages by rank: %s), schedule %s of %d micro-batches, %d "
                "shared parameters; checkpoint=%s",
                *(self._schedule.num_stages, self.group.size, placement.stages_of, self._schedule.name, self.chunks),
                *(len(shared), checkpoint),
            )

    def _checked_memory_cap(self, memory_cap: float | Sequence[float] | None) -> float | Sequence[float] | None:
        if memory_cap is not None and not self._solve_pending:
            raise ValueError(
                f'memory_cap={memory_cap} is for schedule="solve", and has no effect on {self._schedule.name}: take '
                '"solve", or "v_half" or "v_min", which need less memory'
            )
        return memory_cap

    def _prepared(self, stage: nn.Module, device: torch.device | str | int | None, deferred: bool) -> nn.Module:
        """A stage of this rank on its device, with batch norms that update once per step where these are `deferred`."""
        if device is not None and not any(param.is_meta for param in stage.parameters()):
            stage = stage.to(device)
        if deferred:
            stage = DeferredBatchNorm.convert_deferred_batch_norm(stage, self._schedule.num_micro_batches)
        return stage

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs now."""
        return self._schedule

    @property
    def chunks(self) -> int:
        """The most micro-batches of a step."""
        return self._schedule.num_micro_batches

    @property
    def device(self) -> torch.device:
        """The device where this rank computes."""
        params = (param for module in self._modules.values() if module is not None for param in module.parameters())
        return next((param.device for param in params if not param.is_meta), self._requested_device)

    def _build_channels(self) -> None:
        self._device = self.device
        self._channels = build_channels(
            self._schedule, self._cross_stage, self.group, self._pipeline_id, self._device, self._limit
        )

    # Steps.

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeError: the backward of a pipeline is a part of its `step`."""
        raise RuntimeError(
            "a DistributedPipe computes the loss and its gradients in one call: write loss = pipe.step(batch, "
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
        """Runs the forward and backward of a batch; gradients are added to `param.grad` of this rank's stages.

        Args:
            args: Arguments of the first stage: tensors [N, ...] in any nesting. Other ranks may leave them out.
            target: Second argument of the loss function: tensors [N, ...] in any nesting; needed on the rank of the
                last stage.
            loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` without a target: the mean over the samples of a
                micro-batch, or the cross entropy of the targets that count. None where the last stage returns the loss.
            optimizer: One for all stages of this rank, or one per stage by its number. It steps a stage as soon as the
                stage's gradients are complete. If AdaScale measures gradients, it steps when all ranks have finished.
                With None the caller steps, and may clip gradients before.
            stage_inputs: By the number of a stage, further keyword arguments, given on its own rank.
            kwargs: Keyword arguments of the first stage; one with a name from above is given as
                `stage_inputs={0: ...}`.

        Returns:
            The mean loss of the batch: a detached scalar, the same on all ranks.

        Raises:
            StageError: A stage has failed, or its arguments are wrong; on all ranks. Gradients are the same as before
                the step, and training can continue. One reason is a loss that is a mean over a different number of
                elements in each micro-batch, so that the mean of these losses is not the mean over the batch.
            ScaleDistributedError: A rank was lost.
        """
        step_args = StepArgs(Arguments(args, kwargs), target, loss_fn, stage_inputs or {}, optimizer)
        self._begin(StepKind.STEP)
        # In whatever mode a step is called it computes gradients that can be used outside of inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = prepare_inputs(step_args, StepKind.STEP, self._schedule, self.group.rank, self._device)
            stages = {index: runner.module for index, runner in self._runners.items()}
            params = (param for stage in stages.values() for param in stage.parameters())
            has_hooks = any(getattr(param, "_post_accumulate_grad_hooks", None) for param in params)
            calling_hooks = hooks_called_once(stages, inputs) if has_hooks else nullcontext(inputs)
            with restore_grads_on_error(self._runners.values()), calling_hooks as inputs:
                try:
                    inputs = self._begin_gradients(inputs)
                    _, loss = self._run(inputs)
                finally:
                    if self._grads.step is not None:
                        self._grads.close()
        assert loss is not None
        self._contract.step += 1
        if self._check_every and self._contract.step % self._check_every == 1 % self._check_every:
            compare_replicas(list(self._shared.copies.items()), self._contract, self._contract.step)
        if self._solve_pending:
            self._steps_until_solve -= 1
            if not self._steps_until_solve:
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
        """Runs the forward of a batch, in the mode that the modules are in (`pipe.eval()`).

            output = pipe.evaluate(batch)
            loss = pipe.evaluate(batch, target=target, loss_fn=loss_fn)

        Args:
            args: As in `step`.
            target: As in `step`.
            loss_fn: As in `step`. Where the last stage returns the loss itself: `loss_fn=lambda loss: loss`.
            with_output: Whether to return the output with a loss; otherwise it is not kept.
            stage_inputs: As in `step`.
            kwargs: As in `step`.

        Returns:
            Where the rank of the last stage is given a target or a loss function, the mean loss as `step` returns it;
            with `with_output` a tuple of the loss and the output. Without them the output: of the full
            batch on the rank of the last stage, None on the others.

        Raises:
            StageError: As in `step`.
            ScaleDistributedError: As in `step`.
        """
        step_args = StepArgs(Arguments(args, kwargs), target, loss_fn, stage_inputs or {}, with_output=with_output)
        self._begin(StepKind.EVALUATION)
        inputs = prepare_inputs(step_args, StepKind.EVALUATION, self._schedule, self.group.rank, self._device)
        output, loss = self._run(inputs)
        return output if loss is None else (loss, output) if with_output else loss

    def _begin(self, kind: StepKind) -> None:
        """Begins a pass with the stages as they are now; some may have been wrapped or moved."""
        self._loop.begin(kind)
        if self._cross_stage.shared and self._shared.needs_broadcast:
            self._shared.refresh(self)
            self._shared.broadcast_values(self._channels.host, self._schedule.placement, self.group.rank)
        device = self.device
        if device != self._device:
            self._device = device
            self._channels.p2p.set_device(device)
        for index, module in zip(
            self._schedule.placement.stages_of[self.group.rank], self._modules.values(), strict=True
        ):
            runner = self._runners.get(index)
            if runner is None or runner.module is not module:
                assert module is not None
                self._wrappers_changed = True
                skips = self._cross_stage.skips
                pops = {skip.name: skip.key for skip in skips if skip.target == index}
                stashes = {skip.name: skip.key for skip in skips if skip.source == index}
                self._runners[index] = Stage(module, pops, stashes, self.checkpoint)

    def _begin_gradients(self, inputs: StepInputs) -> StepInputs:
        """Looks at wrappers and shared parameters, and announces the step; an error fails it on all ranks."""
        try:
            if self._wrappers_changed:
                check_disjoint_wrappers(self.stages)
                self._wrappers_changed = False
            if self._cross_stage.shared:
                self._shared.refresh(self)
                for runner in self._runners.values():
                    runner.shared = list(self._shared.copies.values())
            if gradient_hooks.microbatch_steps:
                self._grads.begin(self.stages, self._shared.copies)
        except Exception as error:
            action = "what its stages are wrapped in, or measured by"
            failure = failure_from_error(error, rank=self.group.rank, stage=min(self.stages), action=action)
            inputs = inputs._replace(failure=failure, cause=error)
        if self._cross_stage.shared:
            self._shared.set_grads_aside()
        return inputs

    def _run(self, inputs: StepInputs) -> tuple[Any, Tensor | None]:
        """Runs a pass, and returns the output on the last stage's rank and the loss on all."""
        runtime = PassRuntime(
            self.group, self._loop.kind, self._channels, self._runners, inputs, self._shared, self._grads, self._limit
        )
        status = self._loop.run(runtime, self._device)
        return runtime.output, status.loss

    # Measured and solved.

    @property
    def last_trace(self) -> tuple[TimedAction, ...]:
        """This rank's actions of its last pass, in seconds from its start."""
        return () if self._loop.last is None else local_spans(self._loop.last, self.group.rank)

    def measured(self) -> ScheduleSimulation:
        """Returns the last pass of all ranks, to be drawn with the plan; all ranks call it together.

            measured = pipe.measured()
            save_drawing([simulate(pipe.schedule, measured.costs), measured], "step.svg")

        Raises:
            RuntimeError: There was no pass yet.
            TransferError: A rank did not come.
        """
        from scale_pipe.schedules.simulation import ScheduleSimulation  # Steps need no simulator.

        if self._loop.last is None:
            raise RuntimeError("there is nothing measured before the first step: call pipe.step(...) first")
        spans = gather_spans(self._loop.last, self.group, self._limit)
        return ScheduleSimulation(self._schedule, costs_from_spans(spans, self._schedule.num_stages), spans)

    def _solve(self) -> None:
        self._solve_pending = False
        spans = self.measured().spans
        link = measure_link_times(self._schedule.placement, self._channels.p2p, self.group, self._limit)
        costs = costs_from_spans(spans, self._schedule.num_stages, link)
        self._schedule = solve_on_first_rank(self._schedule, costs, self.group, self._memory_cap, self._limit)
        self._build_channels()

    # State.

    def state_dict(  # type: ignore[override]  # torch overloads it
        self, *args: Any, full: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns this rank's part of the state dict of the original model.

        Args:
            args: `destination`, `prefix`, `keep_vars`, as torch has them.
            full: Return a copy of the full state dict on the host of the first rank, in the model's order, and {} on
                other ranks. All ranks call it together, also the ranks that shard a stage or its layers. With False,
                writes to the tensors change the model.
            kwargs: The same by keyword.
        """
        local = super().state_dict(*args, **kwargs)
        placement = self._schedule.placement
        return self._gather_full(local, self.group.rank, self._channels.host, placement) if full else local

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients of all stages so that their norm is at most `max_norm`; all ranks call it together.

        Args:
            max_norm: The largest norm allowed; `math.inf` only measures.
            norm_type: p > 0; `math.inf` is the largest magnitude. A parameter that several stages share counts once.

        Returns:
            The norm before, a scalar, equal on all ranks.

        Raises:
            ValueError: `max_norm` or `norm_type` is not such a number.
            TransferError: A rank did not come.
        """
        gradients = measured_gradients(list(self.parameters()))
        return clip(gradients, float(max_norm), float(norm_type), self._limit, [self])

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Returns this rank's copies of shared parameters that a different rank counts in a norm."""
        return self._shared.counted_elsewhere()

    def shared_names(self) -> dict[Tensor, str]:
        """Returns the names of this rank's copies of shared parameters, by copy; all ranks have the same names."""
        return {param: name for name, param in self._shared.copies.items()}
