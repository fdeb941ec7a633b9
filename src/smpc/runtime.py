"""Runs compiled programs: `Runtime` on one pipeline rank of many processes, `LoopbackRuntime` on all ranks in one process.

    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=4)
    runtime = LoopbackRuntime(model)
    program = runtime.install(compilation)

    def on_output(microbatch, output):              # called on the rank of the last stage, after each forward
        losses.append(output.loss.detach())
        return [(output.loss / 4, None)]            # roots of the backward pass; None for no backward

    runtime.run(program, microbatches, on_output, training=True)

A runtime holds the programs of several signatures of one model; all of them share its parameters. `microbatches` are (args, kwargs) of
the model, one for each microbatch, on pipeline rank 0; the other ranks pass None.

    runtime.observe()                               # on every rank: keep what the next steps take
    ...                                             # steps
    print(runtime.report(dist.group.WORLD))         # predicted against measured, see docs/observability.md
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smpc.absent.half_trained import HalfTrained
from smpc.changes_after_compile import KeptParameters, LateHooks, StateHook
from smpc.codegen.program import RankProgram, split_backwards
from smpc.codegen.rewrite.outputs import written_inputs
from smpc.codegen.rewrite.tensor_parallel.rewrite import CONTEXT, GROUP, group_attribute
from smpc.codegen.rewrite.tensor_parallel.strategy import draws
from smpc.codegen.stage import StageModule, build_stage, compile_stage
from smpc.compile.result import Compilation
from smpc.errors import StepError, UsageError
from smpc.executor.failure.peers import told_to_peers
from smpc.executor.program.interpreter import Interpreter, run_loopback
from smpc.executor.replicas.context_sums import ContextSums
from smpc.executor.replicas.fully_shard import StageShards
from smpc.executor.replicas.group_hooks import StepHooks, innermost
from smpc.executor.shared_draws import StageDraws
from smpc.executor.transport import Transport, loopback_transports
from smpc.nn.init.note_slices import note_parts
from smpc.nn.script_writes.between_steps import plain_parameters
from smpc.nn.script_writes.compare_writes import are_compared, compare_scripts
from smpc.observe.observer import Observer, RankRecord, StepCallback, StepWatch, batch_of
from smpc.observe.window import Window
from smpc.optimizers.torch_patches import check_optimizers, refuse_norms, refuse_scaling
from smpc.output_gradients import copied_outputs, without_gradient
from smpc.partitioner.costs.node_costs import useful_flops
from smpc.partitioner.graph.plan import Plan
from smpc.rank_models import RankModels
from smpc.sample_inputs import Inputs
from smpc.sharding import exchange
from smpc.sharding.dtensors import local
from smpc.tracer.constants import Ref, TraceDevice
from smpc.tracer.environment.environment_guards import Environment
from smpc.tracer.input_guards import broken_guard
from smpc.tracer.ir import NodeKind, Trace
from smpc.tracer.left_inputs import LeftInputs
from smpc.tracer.replay import input_values, is_as_traced
from smpc.tracer.state.attribute_memory import share_elements
from smpc.tracer.state.state_use import StateUse
from smpc.tracer.structure import flatten

if TYPE_CHECKING:
    from smpc.report.measured import Comparison

_numbers = itertools.count()  # of runtimes
Roots = Sequence[tuple[Tensor, Tensor | None]]
OnOutput = Callable[[int, Any], Roots | None]
OnLeft = Callable[[int, LeftInputs], None]


class RankPrograms:
    """One rank's stages and interpreters, for training and evaluation, of one compilation.

    `has_generators`: whether the rank draws from generators of its own, as a process does.
    """

    def __init__(
        self,
        model: nn.Module,
        compilation: Compilation,
        rank: int,
        transport: Transport,
        device: torch.device,
        hooks: Callable[[Mapping[int, StageModule]], StepHooks | None],
        *,
        has_generators: bool,
    ) -> None:
        _check_model(model, compilation)
        self.model = model
        self.trace, self.copied_outputs = compilation.trace, copied_outputs(compilation.trace, compilation.plan)
        self.environment = compilation.environment
        self.plan = compilation.plan
        self.num_ranks = len(compilation.programs)
        self.batch = _batch_size(compilation.trace, compilation.plan)
        self.flops = _flops_of_step(compilation.trace, compilation.plan)
        self._read_inputs, self._written_inputs = _input_reader(compilation.trace), written_inputs(compilation.trace)
        codes = [code for each in compilation.programs for code in each.stages]
        shared = (item.name for item in compilation.plan.shared_parameters)
        self._late_hooks = LateHooks(model, compilation.trace, codes, shared)
        self._late_hooks.check()
        program = compilation.programs[rank]
        self._num_microbatches, self._device = program.num_microbatches, device
        self.stages = {code.index: build_stage(code, model, device) for code in program.stages}
        self.has_output = program.rank == compilation.plan.stages[-1].rank
        self._refreshed = [stage for stage in self.stages.values() if stage.holds_tensors]
        _apply_torch_compile(self.stages, program, model)
        labels = _labels_in_runtime_errors(compilation.trace)
        made = hooks(self.stages)  # may replace the model's parameters
        self.hooks = trains = _summing_in_runtime(made, self.stages, compilation, model)
        self.summed = frozenset(() if compilation.context is None else compilation.context.sharded.summed)
        parameters = shared_parameters(model, program)
        shards = _shards_of(made)
        modules = self.stages if shards is None else shards.modules(self.stages)
        drawing = _drawing_ranks(compilation) if has_generators else []
        own_draws = StageDraws(rank, device) if drawing and rank > drawing[0] else None
        self._interpreters = {
            training: Interpreter(
                programs[rank],
                modules,
                transport,
                device=device,
                parameters=parameters,
                hooks=trains if training else None,
                labels=labels,
                peers=programs,
                draws=own_draws,
            )
            for training, programs in ((True, compilation.programs), (False, compilation.evaluation_programs))
        }

    def interpreter(self, training: bool) -> Interpreter:
        """The interpreter of the training program, or of the program that runs forwards only, for one step."""
        if self._late_hooks.seen != RemovableHandle.next_id:  # torch numbers all hooks of a process
            self._late_hooks.check()
        for stage in self._refreshed:
            stage.refresh()
        return self._interpreters[training]

    def placeholders(self, microbatches: Sequence[Inputs]) -> list[dict[str, Tensor]]:
        """The model's input tensors of every microbatch, by placeholder name, on the device; copies of tensors that the model writes
        into.

        Raises StepError for another number of microbatches than planned, a tensor whose gradient would leave the pipeline, inputs whose
        values violate the trace's guards, or a tensor that the model writes into and that another input or microbatch shares.
        """
        if len(microbatches) != self._num_microbatches:
            raise StepError(f"the program runs {self._num_microbatches} microbatches, found {len(microbatches)}")
        found = []
        shared: dict[tuple[str, int], int] = {}
        for index, (args, kwargs) in enumerate(microbatches):
            values = self._read_inputs(args, kwargs)
            for name, tensor in values.items():
                if tensor.requires_grad:
                    raise StepError(
                        f"model input {name} of microbatch {index} requires grad, but gradients do not flow out of the pipeline; "
                        "detach it, or compute it inside the model"
                    )
            broken = broken_guard(self.trace, self.model, values) if self.trace.guards else None
            if broken is not None:
                raise StepError(
                    f"microbatch {index}: the model's Python depends on {broken[0]}, which was {broken[0].expected} when the model was "
                    f"traced and is {broken[1]} here; compile it for such inputs"
                )
            for name in self._written_inputs:
                self._check_own(name, values, index, shared)
            for name in self._written_inputs:
                values[name] = values[name].clone()
            for name, tensor in values.items():
                values[name] = tensor.to(self._device, non_blocking=True)
            found.append(values)
        return found

    def _check_own(self, name: str, values: Mapping[str, Tensor], index: int, seen: dict[tuple[str, int], int]) -> None:
        """StepError for a tensor into which the model writes, and whose memory another input or microbatch reads: it would read what
        was written."""
        tensor = values[name]
        other = next((each for each in values if each != name and share_elements(tensor, values[each])), None)
        if other is not None:
            raise StepError(
                f"model input {name}: expected a tensor with memory of its own, as the model's forward writes into it, found that of input "
                f"{other}; give the model a copy of one of them (.clone())"
            )
        first = seen.setdefault((name, tensor.data_ptr()), index) if tensor.numel() else index
        if first != index:
            raise StepError(
                f"model input {name}: expected a tensor of its own for each microbatch, as the model's forward writes into it, found the "
                f"same in microbatches {first} and {index}; let it be split, or have forward write into a copy (.clone())"
            )

    def held(self) -> Iterator[Tensor]:
        """Parameters, their gradients, and buffers."""
        for stage in self.stages.values():
            yield from stage.buffers()
            for parameter in stage.parameters():
                yield local(parameter)
                if parameter.grad is not None:
                    yield local(parameter.grad)


class Runtime:
    """One pipeline rank's programs over a transport.

    `model`: the whole module, the same on all ranks; `device`: where this rank computes. `hooks(stages)` gives the data-parallel hooks
    (`smpc.executor.StageReplicas`) for the stage modules of the first compilation; later compilations have other modules over the same
    parameters, and keep the hooks. `observer` watches the steps; by default the runtime makes one.

    The script's own optimizers update the parameters of this rank's stages. If there are several ranks, the first step of one that looks at
    all parameters or all gradients (LBFGS, D-Adaptation, Prodigy, a norm of its own over all) is a ConfigError: each rank would go by its
    own stages. Classes that are not torch's are tried on small tensors. So is `torch.nn.utils.clip_grad_norm_` of their parameters; its
    message says how to clip by the norm of all. So is `torch.amp.GradScaler`, by which each rank would skip steps for itself.
    Once a step has trained, what other ranks have trained is out of date here: `model(x)`, `sum(p.norm() for p in model.parameters())`,
    averages of parameters, `model.state_dict()` and pickling the model are a UsageError (`smpc.absent`). `run(..., training=False)` gives
    the model's outputs; `model.load_state_dict` of what all ranks' stages have makes the model whole, until the next step that trains.
    `checks_script`: False leaves all of this out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        transport: Transport,
        device: torch.device | str = "cpu",
        hooks: Callable[[Mapping[int, StageModule]], StepHooks | None] = lambda stages: None,
        observer: Observer | None = None,
        checks_script: bool = True,
    ) -> None:
        self._model, self._rank, self._transport = model, rank, transport
        self.device = torch.device(device)
        self._observer = observer or Observer(self.device, rank, pipeline_rank=rank)
        self._observer.holders.append(self._held)
        self._optimizer: torch.optim.Optimizer | None = None  # given to `observe`
        self._make_hooks = hooks
        self._hooks: StepHooks | None = None
        self._shards: StageShards | None = None  # one of the hooks
        self._programs: list[RankPrograms] = []
        self._running: Interpreter | None = None
        self._kept: KeptParameters | None = None  # unless its environment is checked elsewhere
        self._compares = False  # what scripts have written into slices
        self._name = f"runtime{next(_numbers)}"  # as on the other ranks, which make as many
        self._others = HalfTrained(model, rank) if checks_script else None
        if self._others is not None:
            self._check_script(self._others)

    def _check_script(self, others: HalfTrained) -> None:
        """Have what a script does to a part of the model, and would do to all of it in one process, raise errors."""
        own = weakref.ref(self)
        parts_in = functools.partial(_stages_in, own)
        state_hook = StateHook(others.refuse_state)
        for undo in (
            check_optimizers(parts_in, "one pipeline rank", are_whole=True),
            refuse_norms(parts_in),
            refuse_scaling(parts_in),
            self._model.register_state_dict_pre_hook(state_hook).remove,  # type: ignore[no-untyped-call]
        ):
            weakref.finalize(self, undo)

    @property
    def stages(self) -> Mapping[int, StageModule]:
        """This rank's stage modules, by stage index; parameters have their names in the whole model."""
        return self._programs[0].stages

    def install(self, compilation: Compilation, program: int | None = None) -> int:
        """Builds the stages of a compilation over the model's own parameters; returns the index to run it by.

        `program`: the index to use, either the next one or the index of a program that this one replaces. The first one cannot
        be replaced.
        """
        if self._kept is not None:
            self._kept.check(thoroughly=True)
        if self._others is not None:
            self._others.check(compilation)
        new = RankPrograms(
            self._model, compilation, self._rank, self._transport, self.device, self._hooks_for, has_generators=True
        )
        self._compares = are_compared(self._model)
        if self._kept is None and compilation.environment is not None:
            self._kept = KeptParameters(self._model)  # the hooks may have replaced them
        number = len(self._programs) if program is None else program
        if self._others is not None:
            self._others.add(number, compilation)
        if number == len(self._programs):
            self._programs.append(new)
            return number
        assert 0 < number < len(self._programs), "the first program's stages are those of the replicas"
        self._programs[number] = new
        return number

    def run(
        self,
        program: int,
        microbatches: Sequence[Inputs] | None,
        on_output: OnOutput | None,
        *,
        training: bool,
        on_left: OnLeft | None = None,
    ) -> None:
        """One step: forwards and, when `training`, backwards of all microbatches.

        The model gets copies of inputs that its forward changes. Where it changes any, `on_left(microbatch, left)` is called before
        `on_output`, on the same rank: `left.put_into((args, kwargs))` changes such inputs as forward has changed its copies.

        UsageError if it trains, and the rank of the last stage has no `on_output`, or one that does not return roots. Where a rank raises
        in the middle of a step, the others raise PeerError with its traceback, and the transport is closed.
        """
        programs = self._programs[program]
        if training and on_output is None and programs.has_output:
            raise UsageError(
                f"run: expected on_output on pipeline rank {self._rank}, whose stage {max(programs.stages)} is the last one under this "
                "schedule, as it gives the losses of a training step, found None: nothing would be trained; pass it on every rank, other "
                "ranks do not call it"
            )
        if programs.environment is not None:
            _check_environment(programs.environment)
        if self._kept is not None:
            self._kept.check()
        interpreter = self._running = programs.interpreter(training)
        inputs = None if microbatches is None else programs.placeholders(microbatches)
        output = None
        if on_output is not None:
            output = restored(programs.trace, on_output, self.device, programs.copied_outputs, on_left)
        observer = self._observer
        is_told = self._others is not None and programs.num_ranks > 1
        told = told_to_peers(self._name, self._rank, interpreter.close) if is_told else contextlib.nullcontext()
        sliced = plain_parameters(self._model) if GROUP in vars(self._model) else contextlib.nullcontext()
        with told, sliced, observer.step(functools.partial(_tensors_to_runtime, inputs)) as watch:
            if self._others is not None:
                self._others.check_program(program)
            if self._compares:
                compare_scripts(self._model)
            if watch.is_wanted:
                watch.program = program
                with _watching_runtime(interpreter, watch, programs, training):
                    interpreter.run(inputs, _noting_loss(output, watch))
            else:
                interpreter.run(inputs, output)
        if self._shards is not None:
            self._shards.release()
        self._running = None
        if training and self._others is not None:
            self._others.note_training(program)

    def register_step_callback(self, callback: StepCallback) -> RemovableHandle:
        """Call `callback(info)` after every step on this rank, with a `smpc.StepInfo`."""
        return self._observer.register(callback)

    def observe(self, num_steps: int = 20, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Measure memory in the next step, and times in the `num_steps` after it, for `report`. Every rank calls it, between steps.

        Before the first step: memory in the second one, as the optimizer has no state in the first.
        Optimizer state counts as memory; on a CPU it is known only if the optimizer is given, after its first step.
        """
        self._optimizer = optimizer
        self._observer.observe(num_steps)

    @property
    def record(self) -> RankRecord:
        """This rank's measurements since `observe`."""
        return self._observer.record

    def report(self, group: dist.ProcessGroup | None = None) -> Comparison:
        """Predicted against measured memory and time of the first program, on this rank; `print` it.

        With a process group of the pipeline's ranks, the report covers all of them: every rank calls it. Raises UsageError
        without `observe`.
        """
        from smpc.report.measured import compare

        records: list[Any] = [self.record]
        if group is not None:
            records = [None] * group.size()
            dist.all_gather_object(records, self.record, group=group)
        _check_records(records)
        return compare(self._programs[0].plan, records)

    def _held(self) -> Iterator[Tensor]:
        for programs in self._programs[:1]:  # later ones have the same parameters
            yield from programs.held()
        yield from self._transport.held()
        for own in () if self._optimizer is None else self._optimizer.state.values():
            yield from (value for value in own.values() if isinstance(value, Tensor))

    @property
    def hooks(self) -> StepHooks | None:
        """The hooks of training steps of the first program; None before it is installed, and without replicas."""
        return self._programs[0].hooks if self._programs else None

    def sums_like_first(self, program: int) -> bool:
        """Whether gradients of the same parameters are summands on ranks that share sequences, as in the first program."""
        return self._programs[program].summed == self._programs[0].summed

    def did_not_train(self) -> None:
        """Notes that the last training step did no backward."""
        if self._hooks is not None:
            self._hooks.did_not_train()

    def where(self) -> str:
        """The instruction that is running now, for people; "" between steps. For any thread: the step may end meanwhile."""
        running = self._running
        return "" if running is None else running.where()

    def position(self) -> int:
        """The number of finished instructions of the running step; 0 between steps. For any thread."""
        running = self._running
        return 0 if running is None else running.position

    def _hooks_for(self, stages: Mapping[int, StageModule]) -> StepHooks | None:
        if not self._programs:
            self._hooks = self._make_hooks(stages)
            self._shards = _shards_of(self._hooks)
            if self._shards is not None:
                note_parts()
                exchange(self._model, self._shards.exchanged)
        return self._hooks


def _stages_in(found: weakref.ref[Runtime], held: Sequence[Tensor]) -> str:
    """What of a model an optimizer's parameters are, if other ranks have the rest."""
    runtime = found()
    if runtime is None or not runtime._programs or runtime._programs[0].num_ranks == 1:
        return ""
    own = {id(parameter) for stage in runtime.stages.values() for parameter in stage.parameters()}
    return "the stages of one rank of a pipeline" if any(id(each) in own for each in held) else ""


class LoopbackRuntime:
    """All pipeline ranks in one process, over the parameters of one model.

    Every rank has memory of its own on `device`, as `smpc.rank_models` says: a model that works here works on separate processes.
    Gradients, buffers and attributes are copied back to the model.
    """

    def __init__(self, model: nn.Module, device: torch.device | str = "cpu") -> None:
        self._model, self._device = model, torch.device(device)
        self._programs: list[tuple[RankPrograms, ...]] = []
        self._models: RankModels | None = None
        self._observers: list[Observer] = []  # by rank, after `observe`

    def install(self, compilation: Compilation) -> int:
        """Builds every rank's stages; returns the index to run the compilation by."""
        num_ranks = len(compilation.programs)
        if self._models is None:
            self._models = RankModels(self._model, compilation.plan, compilation.programs)
        self._models.follow()
        self._models.add(compilation.plan, StateUse.of(compilation.trace))
        models = self._models.of_rank
        transports = loopback_transports(num_ranks, self._device)
        self._programs.append(
            tuple(
                RankPrograms(
                    model, compilation, rank, transports[rank], self._device, lambda stages: None, has_generators=False
                )
                for rank, model in enumerate(models[:num_ranks])
            )
        )
        return len(self._programs) - 1

    def stages(self, program: int = 0) -> dict[int, StageModule]:
        """The stage modules of all ranks, by stage index."""
        return {index: stage for rank in self._programs[program] for index, stage in rank.stages.items()}

    def run(self, program: int, microbatches: Sequence[Inputs], on_output: OnOutput | None, *, training: bool) -> None:
        """One step of all ranks."""
        ranks = self._programs[program]
        if ranks[0].environment is not None:
            _check_environment(ranks[0].environment)
        assert self._models is not None, "a program is installed"
        self._models.begin_step()
        interpreters = [rank.interpreter(training) for rank in ranks]
        inputs = ranks[0].placeholders(microbatches)
        output = (
            None if on_output is None else restored(ranks[0].trace, on_output, self._device, ranks[0].copied_outputs)
        )
        with contextlib.ExitStack() as stack:
            for rank, observer in enumerate(self._observers):
                watch = stack.enter_context(observer.step())
                watch.program = program
                stack.enter_context(_watching_runtime(interpreters[rank], watch, ranks[rank], training))
            run_loopback(interpreters, inputs, output)
        self._models.end_step()

    def observe(self, num_steps: int = 20) -> None:
        """Measure the times of the next `num_steps` steps, for `report`."""
        num_ranks, window = len(self._require_programs()[0]), Window(0, num_steps)
        self._observers = [Observer(self._device, rank, pipeline_rank=rank, window=window) for rank in range(num_ranks)]

    def report(self) -> Comparison:
        """Predicted against measured times of the stages of the first program; `print` it.

        Ranks that share a process take turns, so the report compares neither step times nor peaks of ranks. Raises
        UsageError without `observe`.
        """
        from smpc.report.measured import compare

        records = [observer.record for observer in self._observers]
        _check_records(records)
        return compare(self._require_programs()[0][0].plan, records, is_parallel=False)

    def _require_programs(self) -> list[tuple[RankPrograms, ...]]:
        if not self._programs:
            raise UsageError("the runtime has no program yet; install a compilation first")
        return self._programs


@contextlib.contextmanager
def _watching_runtime(
    interpreter: Interpreter, watch: StepWatch, programs: RankPrograms, training: bool
) -> Iterator[None]:
    """Records the spans of one step, and its kind."""
    watch.training = training
    watch.samples, watch.tokens = programs.batch
    watch.flops = programs.flops[training]
    if watch.recorder is None:
        yield
        return
    watch.recorder.begin()
    interpreter.record(watch.recorder)
    try:
        yield
    finally:
        interpreter.record(None)
    watch.spans = watch.recorder.take()


def _noting_loss(
    on_output: Callable[[int, tuple[Tensor, ...]], Roots | None] | None, watch: StepWatch
) -> Callable[[int, tuple[Tensor, ...]], Roots | None] | None:
    """`on_output`, which also notes the losses: roots that are given without a gradient."""
    if on_output is None:
        return None

    def call(microbatch: int, outputs: tuple[Tensor, ...]) -> Roots | None:
        roots = on_output(microbatch, outputs)
        for root in roots if isinstance(roots, (list, tuple)) else ():  # others are an error of the executor
            match root:
                case (Tensor() as loss, None):
                    watch.losses.append(loss.detach())
        return roots

    return call


def _apply_torch_compile(stages: Mapping[int, StageModule], program: RankProgram, model: nn.Module) -> None:
    """Applies torch.compile; warns of compiled modules that run uncompiled."""
    splits = bool(split_backwards(program.instructions))
    found = [compile_stage(stages[code.index], code, model, splits=splits) for code in program.stages]
    for text in dict.fromkeys(filter(None, found)):
        warnings.warn(text, stacklevel=2)


def _tensors_to_runtime(inputs: Sequence[Mapping[str, Tensor]] | None) -> Iterator[Tensor]:
    for values in inputs or ():
        yield from values.values()


def _drawing_ranks(compilation: Compilation) -> list[int]:
    """The pipeline ranks whose stages draw random numbers, in order."""
    ranks = {stage.index: stage.rank for stage in compilation.plan.stages}
    drawn = {node.name for node in compilation.trace.nodes if draws(node)}
    return sorted({ranks[stage] for name, stage in compilation.plan.assignment if name in drawn})


def _check_environment(environment: Environment) -> None:
    """Raise StepError if the model's Python would read other values than when it was recorded; otherwise set the state that it leaves."""
    difference = environment.difference()
    if difference is not None:
        raise StepError(f"{difference} when the model was compiled; compile it again, or put it back")
    environment.leave()


def _batch_size(trace: Trace, plan: Plan) -> tuple[int | None, int | None]:
    """Samples and tokens of a step."""
    specs = [node.spec for node in trace.nodes if node.kind is NodeKind.PLACEHOLDER and node.spec is not None]
    integers = ("int64", "int32")
    return batch_of([(spec.shape, spec.dtype in integers) for spec in specs], plan.schedule.num_microbatches)


def _flops_of_step(trace: Trace, plan: Plan) -> tuple[float, float]:
    """FLOPs of a step, averaged over the pipeline's ranks: of its forwards, and of forwards and backwards."""
    forward, both = useful_flops(trace)
    share = plan.schedule.num_microbatches / plan.pipeline_parallel_degree
    return forward * share, both * share


def _check_records(records: Sequence[RankRecord]) -> None:
    if not records or not all(any(step.training for step in record.steps) for record in records):
        raise UsageError(
            "report: no training step has been measured; call observe() on every rank, then run training steps (with several "
            "processes memory is measured in the first one, times in those after it)"
        )


def shared_parameters(model: nn.Module, program: RankProgram) -> dict[str, nn.Parameter]:
    """The parameters that this rank shares with others, by canonical name."""
    named = dict(model.named_parameters())
    return {name: named[name] for name, ranks in program.shared_parameters if program.rank in ranks}


def _input_reader(trace: Trace) -> Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Tensor]]:
    """`input_values` of this trace, with all lookups done in advance: a step calls it for every microbatch."""
    expected: list[tuple[str, tuple[int, ...], torch.dtype | None, Any]] = []  # no dtype: a constant
    for traced in trace.input_leaves:
        spec = trace.node(traced.name).spec if isinstance(traced, Ref) else None
        if spec is None:
            expected.append(("", (), None, traced))
        else:
            expected.append((traced.name, spec.shape, spec.torch_dtype, spec))

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        if structure != trace.inputs:
            return input_values(trace, args, kwargs)  # raises the error
        values = {}
        for leaf, (name, shape, dtype, traced) in zip(leaves, expected, strict=True):
            if dtype is None:
                is_right = is_as_traced(leaf, traced)
            else:
                is_right = isinstance(leaf, Tensor) and leaf.shape == shape and leaf.dtype is dtype
                values[name] = leaf
            if not is_right:
                return input_values(trace, args, kwargs)
        return values

    return read


def _labels_in_runtime_errors(trace: Trace) -> dict[str, str]:
    """A value's name in error messages: its own name, and the innermost module that makes it."""
    makers = {trace.nodes[i].name: call.fqn for call in trace.calls for i in range(call.first, call.last)}
    return {name: f"{name} of module {fqn}" for name, fqn in makers.items() if fqn}


def _check_model(model: nn.Module, compilation: Compilation) -> None:
    """Raise UsageError for a model that is not placed as the compilation says."""
    if compilation.sharded is not None and GROUP not in vars(model):
        raise UsageError(
            "expected a model whose parameters are slices, as the compilation is tensor parallel, found a whole one; call "
            "smpc.tensor_parallel.place(model, compilation.sharded, group) first"
        )
    if compilation.divided is not None:
        raise UsageError(
            "expected a compilation with the model's own experts, found one that divides them: it is a plan; to run "
            "one, call smpc.expert_parallel.shard(model, group), and compile the result without expert_parallel_degree"
        )
    if compilation.context is not None and group_attribute(CONTEXT) not in vars(model):
        raise UsageError(
            "expected a model that knows the ranks it shares sequences with, as the compilation is context parallel, found one that "
            "does not; call smpc.context_parallel.place(model, compilation.context, group) first"
        )


def restored(
    trace: Trace,
    on_output: OnOutput,
    device: torch.device,
    copied: frozenset[str] = frozenset(),
    on_left: OnLeft | None = None,
) -> Callable[[int, tuple[Tensor, ...]], Roots | None]:
    """`on_output` for the interpreter: it gets the last stage's tensors, the user the model's output, `copied` without gradients."""
    positions = {name: i for i, name in enumerate(trace.output_names)}
    inputs = {leaf.name: i for i, leaf in enumerate(trace.input_leaves) if isinstance(leaf, Ref)}
    written = [inputs[name] for name in trace.written]
    end, changes = trace.output.num_leaves, bool(written) or trace.left is not None
    apart = [positions[name] for name in trace.output_names if name in copied]

    def call(microbatch: int, outputs: tuple[Tensor, ...]) -> Roots | None:
        for position in apart:
            without_gradient(outputs[position])
        leaves: list[Any] = [
            outputs[positions[leaf.name]]
            if isinstance(leaf, Ref)
            else device
            if isinstance(leaf, TraceDevice)
            else leaf
            for leaf in trace.output_leaves
        ]
        if on_left is not None and changes:
            changed = list(zip(written, leaves[end:], strict=False))
            on_left(microbatch, LeftInputs(trace.inputs, trace.left, leaves[end + len(written) :], changed))
        return on_output(microbatch, trace.output.unflatten(leaves))

    return call


def _summing_in_runtime(
    hooks: StepHooks | None, stages: Mapping[int, StageModule], compilation: Compilation, model: nn.Module
) -> StepHooks | None:
    """The hooks, with gradients that are summands on the ranks of a sequence summed over these ranks."""
    if compilation.context is None or not compilation.context.sharded.summed:
        return hooks
    names = frozenset(compilation.context.sharded.summed)
    found = {id(p): p for stage in stages.values() for name, p in stage.named_parameters() if name in names}
    return ContextSums(found.values(), vars(model)[group_attribute(CONTEXT)], hooks)


def _shards_of(hooks: StepHooks | None) -> StageShards | None:
    """The hooks that shard the stages' parameters over replicas, possibly inside hooks for a tensor-parallel group."""
    inner = innermost(hooks)
    return inner if isinstance(inner, StageShards) else None
