"""Lightning, training a pipeline: a Strategy for its Trainer, and the same LightningModule, callbacks, files and losses.

    from smpc.integrations.lightning import PipelineStrategy

    strategy = PipelineStrategy({"pipeline_parallel_degree": 2, "microbatches": 4})
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=3)
    trainer.fit(module, loader)

    smpc run -n 2 train.py

Lightning keeps control of loops, optimizers, schedulers, accumulation, clipping, evaluation, callbacks, loggers, checkpoints.

Terms
    network     the child of the LightningModule that has all of its parameters, such as `self.model`. It becomes the
                smp.DistributedModel. `training_step` and its kin run in step functions: on the first rank up to the call of the network,
                and for every microbatch on the last
    count       of a batch: what its losses are means over, rows, or labels that count. Microbatches weigh by it, so that their mean is
                the batch's mean; a value logged with a `batch_size` is weighted by it, as in Lightning
    logged      what `self.log` is told in such a step: the batch's value, logged on every rank. It is the mean over microbatches, or their
                sum, largest or smallest, as `reduce_fx` says, unless the rehearsal finds another (`smpc.integrations.whole_batch_check`)

Files are in Lightning's format: a checkpoint has the state dict of the whole module and of its optimizer, so that
`load_from_checkpoint`, a job on another number of ranks, or Lightning in one process reads it. The random state of every rank is beside
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

import smpc.v1 as smp
from smpc.checkpoint import capture_rng, restore_rng
from smpc.errors import ConfigUnsupportedError, StepError, UsageError
from smpc.integrations.batches import divides, joined, microbatches_of, start, uneven_labels, warn_of_uneven_labels
from smpc.integrations.whole_batch_check import HeardModel, Rehearsal, changed, check_loss_is_mean, marks, put_together

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from smpc.integrations.lightning_norms import exchange_grad_norm
except ModuleNotFoundError as error:
    needed = f"smpc.integrations.lightning needs {error.name}: pip install 'smpc[lightning]'"
    raise ModuleNotFoundError(needed, name=error.name) from error

_RANDOM = "smpc_random_state"  # in a checkpoint: of every rank
_LOG, _OUTPUT = "log ", "output"  # names of numbers begin with it
_LIGHTNINGS_OWN = ("log", *vars(LightningModule()))  # attributes
_KEPT_IN = {
    f"{name}_step": f"on_{prefix}_batch_end"
    for name, prefix in (("training", "train"), ("validation", "validation"), ("test", "test"), ("predict", "predict"))
}
_REMEDY = (
    "pass PipelineStrategy(config, count=...), a function from a batch to what its losses are means over, with weights of classes their "
    "sum over the batch, or set microbatches: 1"
)


class PipelineStrategy(Strategy):  # type: ignore[misc]
    """Lightning's Strategy for a module that is spread over several ranks; construct it on every rank, before data loaders.

    `pipeline`: the configuration of `smp.init`; None where the script has called that. `network`: the name of the module's child that
    has its parameters; by default the only child that has any. `count`: a function from a batch to the number of items that its losses are
    means over, for a causal language model `lambda batch: (batch["labels"][:, 1:] != -100).sum()`; by default all microbatches have as
    many.

    Raises ConfigUnsupportedError, with a line for each, for features that a pipeline cannot support: manual optimization, several
    optimizers, precision of Lightning's (`bf16: true` in the configuration keeps fp32 masters), parameters outside of the network.
    """

    optimizers: Any
    strategy_name = "smpc"
    is_distributed = (
        False  # Lightning leaves data loaders alone: what it would divide among ranks is divided among replicas
    )

    def __init__(
        self,
        pipeline: Mapping[str, Any] | None = None,
        network: str | None = None,
        *,
        count: Callable[[Any], Any] | None = None,
    ) -> None:
        start(pipeline, "PipelineStrategy", "PipelineStrategy({'pipeline_parallel_degree': 2, 'microbatches': 4})")
        super().__init__()
        self._name, self._count = network, count
        self._has_warned = False
        self._rehearsals: dict[str, Rehearsal] = {}
        self._take_back_norms: Callable[[], None] = lambda: None
        self._is_first = True  # whether gradients of the next batch are the first of an update
        self.global_rank, self.local_rank, self.world_size = smp.rank(), smp.local_rank(), smp.size()
        rank_zero_only.rank = self.global_rank

    # -- where --------------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        device: torch.device = smp.state.session.device
        return device

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank logs and writes."""
        return self.global_rank == 0

    @property
    def network(self) -> Any:
        """The smp.DistributedModel in the module, once training or evaluation has begun."""
        return getattr(self.lightning_module, str(self._name))

    def model_to_device(self) -> None:
        """Nothing: whole, the module may be larger than the device."""

    def process_dataloader(self, dataloader: object) -> object:
        """The same, which must be divided among replicas already, where there are several."""
        rank, size = _lightning_replica()
        sampler = _sampler_of(dataloader) if isinstance(dataloader, DataLoader) else None
        if size == 1 or (
            isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) == (rank, size)
        ):
            return dataloader
        raise UsageError(
            f"expected a DataLoader whose sampler is DistributedSampler(data, num_replicas={size}, rank={rank}), as there are {size} "
            f"replicas of the pipeline, found {type(sampler or dataloader).__name__}; docs/data_loading.md"
        )

    # -- setting up ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Make the network a DistributedModel, and the optimizer one of it."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = _lightning_module(self)
        self._name = _check_module(module, self._name, self.precision_plugin)
        if not isinstance(self.network, smp.DistributedModel):
            setattr(module, self._name, smp.DistributedModel(self.network))
        self._take_back_norms = exchange_grad_norm()
        self._log_over_replicas(module)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            with self.standing_in(self.network.get_module()):  # which has children, to make groups of parameters of
                self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise ConfigUnsupportedError(
                    f"configure_optimizers: expected one optimizer with a pipeline, found {len(self.optimizers)}; use parameter groups"
                )
            self.optimizers = [_Optimizer(self.optimizers[0])]

    def teardown(self) -> None:
        """Leave the module where it is."""
        self._take_back_norms()
        vars(_lightning_module(self)).pop("log", None)
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _log_over_replicas(self, module: LightningModule) -> None:
        """Have `sync_dist` of the module's `log` mean the replicas: Lightning asks the strategy whether there are several ranks."""
        own = type(module).log

        def log(*args: Any, **kwargs: Any) -> None:
            self.is_distributed = _lightning_replica()[1] > 1
            try:
                own(module, *args, **kwargs)
            finally:
                self.is_distributed = False

        object.__setattr__(module, "log", log)

    # -- a batch ------------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Whether it begins an update."""
        self._is_first = batch_idx % _lightning_module(self).trainer.accumulate_grad_batches == 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch, all microbatches of it; what the module's step returns, on every rank."""
        optimizer = self.optimizers[0]
        if self._is_first:
            optimizer.zero_grad()
        output = self._step("training_step", args, kwargs, _lightning_module(self).trainer.accumulate_grad_batches)
        optimizer.holds = True
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of validation."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of a test."""
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions of one batch."""
        return self._evaluate("predict_step", args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's hooks around a backward that `training_step` has done."""
        module = _lightning_module(self)
        loss: Tensor = self.precision_plugin.pre_backward(closure_loss, module)
        self.optimizers[0].holds = False
        closed: Tensor = self.precision_plugin.post_backward(loss, module)
        return closed

    def _evaluate(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return self._step(hook, args, kwargs, 0)

    def _step(self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], divisor: int) -> Any:
        batch, *rest = (*args, *kwargs.values())
        whole = not divides(batch)
        run = _run_whole if whole else _run_in_lightning
        total = None if whole else self._counted(batch)
        self.rehearsal(hook).begin()
        call = _Call(self, hook, tuple(rest), divisor, total, whole)
        output, values, told, exact, is_exact = run(self.network, batch, call)
        known = {name: value.reduce_sum() for name, value in exact.items()} if True in is_exact else {}
        module = _lightning_module(self)
        for name, value in values.items():
            options = told[name][0]
            kwargs, found = options.kwargs, _put_together_in_lightning(value, told[name], whole=whole)
            if options.size and not whole:
                kwargs = {**kwargs, "batch_size": sum(each.size for each in told[name])}
            module.log(name, known.get(f"{_LOG}{name}", found).float(), *options.args, **kwargs)
        made = _mean_of_outputs(output, whole=whole)
        return _map_numbers(made, _OUTPUT, lambda name, value: _like(value, known[name]) if known else value)

    def rehearsal(self, hook: str) -> Rehearsal:
        """Of the module's step of this name."""
        return self._rehearsals.setdefault(hook, Rehearsal())

    @contextlib.contextmanager
    def standing_in(self, network: Any) -> Iterator[None]:
        """What the module finds in this context where it looks for its network."""
        own = vars(_lightning_module(self))
        own[str(self._name)] = network  # found before the children
        try:
            yield
        finally:
            del own[str(self._name)]

    def marks(self) -> dict[str, Any]:
        """Of the module's attributes that are the script's own."""
        return marks(_lightning_module(self), (*_LIGHTNINGS_OWN, str(self._name)))

    def _counted(self, batch: Any) -> float | None:
        """The count of a batch that is cut; None if all of its microbatches weigh alike."""
        if self._count is not None:
            counts = [float(self._count(each)) for each in microbatches_of(batch)]
            if 0.0 in counts:
                raise UsageError(
                    f"count: expected items in every microbatch, found {counts}; over none there is no mean: use fewer microbatches, or "
                    "batches whose samples all have some"
                )
            return sum(counts)
        if not self._has_warned:
            remedy = (
                "pass PipelineStrategy(config, count=...), a function from a batch to what its losses are means over, for a causal "
                "language model lambda batch: (batch['labels'][:, 1:] != -100).sum()"
            )
            self._has_warned = warn_of_uneven_labels(uneven_labels(batch), remedy)
        return None

    def weight(self, microbatch: Any, total: float | None) -> float:
        """The factor of a microbatch's means, so that their mean is the batch's; `total`: the batch's count."""
        if total is None or self._count is None:
            return 1.0
        return float(self._count(microbatch)) / total * int(smp.state.cfg.microbatches)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[tuple[dict[str, Tensor], dict[str, _Options]]]:
        """The values that the module logs in this context, by name, with options."""
        module: Any = _lightning_module(self)
        values: dict[str, Tensor] = {}
        told: dict[str, _Options] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(value, Tensor | int | float):
                raise ConfigUnsupportedError(
                    f"self.log({name!r}): expected a tensor or a number with a pipeline, found {type(value).__name__}, which would count "
                    "on the last rank alone; log its value"
                )
            values[name] = torch.as_tensor(value, dtype=torch.float32).detach()
            told[name] = _Options(args, kwargs)

        outer = module.log
        object.__setattr__(module, "log", log)
        try:
            yield values, told
        finally:
            object.__setattr__(module, "log", outer)

    # -- over replicas ------------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, largest or smallest value over the replicas."""
        if _lightning_replica()[1] == 1 or not isinstance(tensor, Tensor):
            return tensor
        total, rule = tensor.clone(), str(reduce_op).rpartition(".")[2].lower()
        how = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(rule, dist.ReduceOp.SUM)
        dist.all_reduce(total, how, group=_lightning_replicas())
        return total / _lightning_replica()[1] if rule in ("mean", "avg") else total

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Tensors of all replicas, stacked."""
        size = _lightning_replica()[1]
        if size == 1:
            return tensor
        found = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(found, tensor.contiguous(), group=_lightning_replicas())
        return torch.stack(found)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        smp.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank, on all."""
        return smp.allgather(obj, smp.WORLD)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say so."""
        votes = smp.allgather(bool(decision), smp.WORLD)
        return False not in votes if all else True in votes

    # -- files --------------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: there is a DistributedModel to load into then."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module, on rank 0; call it on every rank."""
        own = self.network.state_dict(gather_to_rank0=True)
        found = {f"{self._name}.{name}": value for name, value in own.items()}
        for name, child in _lightning_module(self).named_children():
            if name != self._name:
                found |= child.state_dict(prefix=f"{name}.")
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole module's."""
        given, prefix = dict(checkpoint["state_dict"]), f"{self._name}."
        own = {name.removeprefix(prefix): given.pop(name) for name in [*given] if name.startswith(prefix)}
        self.network.load_state_dict(own, strict=strict)
        for name, child in _lightning_module(self).named_children():
            if name != self._name:
                part = {
                    key.removeprefix(f"{name}."): value for key, value in given.items() if key.startswith(f"{name}.")
                }
                child.load_state_dict(part, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state, on rank 0; call it on every rank."""
        found: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state: dict[str, Any] = found.state_dict(gather_to_rank0=True)
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load it, and restore the random states, before data loaders begin to draw."""
        self.optimizers[0].load_state_dict(checkpoint["optimizer_states"][0])
        found = checkpoint.get(_RANDOM, ())
        if len(found) == smp.size():
            restore_rng(found[smp.rank()])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, on one rank, with the random states of all."""
        checkpoint[_RANDOM] = smp.allgather(capture_rng(), smp.WORLD)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class _Options:
    """How something was logged; one value to a step, which would take a dataclass apart."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.size = kwargs.get("batch_size")  # what Lightning weighs it by

    @property
    def rule(self) -> str:
        """How values of microbatches make the batch's."""
        given = self.kwargs.get("reduce_fx", "mean")
        name = str(getattr(given, "__name__", given)).lower()
        return name if name in ("sum", "max", "min") else "mean"


class _Optimizer(smp.DistributedOptimizer):
    """Lightning clears gradients between a forward and its backward, and a pipeline has done both by then.

    `holds`: gradients belong to the batch that is being trained, and stay.
    """

    holds = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are to stay."""
        if not self.holds:
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which runs the batch, then update."""
        found = None if closure is None else closure()
        super().step()
        return found


# -- step functions ---------------------------------------------------------------------------------------------------------------


class _Call:
    """One call of a step of the module: its name, arguments after the batch, the divisor of the loss or 0, the batch's count or None."""

    def __init__(
        self,
        strategy: PipelineStrategy,
        hook: str,
        rest: tuple[Any, ...],
        divisor: int,
        total: float | None,
        whole: bool,
    ) -> None:
        self.strategy, self.hook, self.rest = strategy, hook, rest
        self.divisor, self.total, self.whole = divisor, total, whole

    def run(self, network: Any, batch: Any) -> _Ran:
        """The module's step on a batch or microbatch."""
        strategy = self.strategy
        with strategy.collecting() as (values, told), strategy.standing_in(network):
            output = getattr(strategy.lightning_module, self.hook)(batch, *self.rest)
        return _Ran(output, values, told)

    def run_microbatch(self, network: Any, batch: Any) -> _Ran:
        """The module's step on a microbatch, which may change nothing of the module. Raises StepError if it does."""
        before, heard = self.strategy.marks(), HeardModel(network)
        ran = self.run(heard, batch)
        if found := changed(before, self.strategy.marks()):
            raise StepError(
                f"{self.hook}: expected no effect but what it returns and logs, found that it changed {', '.join(found)} of the module: a "
                "pipeline runs it for every microbatch, on the last rank alone. Return what is to be kept, and keep it in "
                f"{_KEPT_IN.get(self.hook, 'a callback')}, whose outputs every rank is given; of a metric, log what its function returns"
            )
        ran.returned = heard.returned
        return ran

    def rehearsed(self, network: Any) -> Callable[[Any, Any], dict[str, Tensor]]:
        """The module's step on a whole batch, whose network has returned what it is given; its numbers."""
        return lambda batch, output: self.run(HeardModel(network, output), batch).numbers()


@dataclass(slots=True)
class _Ran:
    """What a step of the module gave. `returned`: by its network."""

    output: Any
    values: dict[str, Tensor]
    told: dict[str, _Options]
    returned: list[Any] = field(default_factory=list)

    def weighed(self, weight: float) -> None:
        """Make means over the microbatch parts of the mean over the batch."""
        self.output = _weighed_for_lightning(self.output, weight)
        self.values = {
            name: value
            if self.told[name].size or self.told[name].rule != "mean"
            else _weighed_for_lightning(value, weight)
            for name, value in self.values.items()
        }

    def loss(self) -> Tensor:
        """What is differentiated."""
        found = self.output.get("loss") if isinstance(self.output, Mapping) else self.output
        if not isinstance(found, Tensor):
            raise UsageError(
                f"training_step: expected a tensor, or a dict with 'loss', found {type(self.output).__name__}; a pipeline skips no batch"
            )
        return found

    def loss_name(self) -> str:
        """Of the loss among the numbers."""
        return f"{_OUTPUT}['loss']" if isinstance(self.output, Mapping) else _OUTPUT

    def rules(self) -> dict[str, str]:
        """How numbers of microbatches make the batch's, by name."""
        return {f"{_LOG}{name}": options.rule for name, options in self.told.items()}

    def numbers(self) -> dict[str, Tensor]:
        """All numbers by name."""
        found = {f"{_LOG}{name}": value for name, value in self.values.items()}
        _map_numbers(self.output, _OUTPUT, lambda name, value: found.update({name: torch.as_tensor(value)}))
        return found


def _model_body(network: Any, batch: Any, call: _Call) -> Any:
    strategy = call.strategy
    ran = call.run_microbatch(network, batch)
    is_models_own = bool(call.divisor) and any(ran.loss() is each for each in tree_leaves(ran.returned))
    weight = strategy.weight(batch, call.total)
    ran.weighed(weight)
    exact, is_exact = {}, False
    rehearsal = strategy.rehearsal(call.hook)
    if not call.whole and not is_models_own and rehearsal.is_due(ran.returned):
        numbers = ran.numbers()
        exact = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in numbers.items()}
        if rehearsal.add(batch, ran.returned[0], numbers, weight):
            found = rehearsal.run(call.rehearsed(network), ran.rules())
            if call.divisor:
                check_loss_is_mean(found, ran.loss_name(), call.hook, _REMEDY)
            if found is not None and found.other:
                exact, is_exact = {name: value.double() for name, value in found.exact.items()}, True
    if call.divisor:
        loss = ran.loss()
        network.backward(loss if call.divisor == 1 else loss / call.divisor)
    return ran.output, ran.values, ran.told, exact, is_exact


@smp.step
def _run_in_lightning(network: Any, batch: Any, call: Any) -> Any:
    return _model_body(network, batch, call)


@smp.step(non_split_inputs=["batch"])
def _run_whole(network: Any, batch: Any, call: Any) -> Any:
    return _model_body(network, batch, call)


def _weighed_for_lightning(value: Any, weight: float) -> Any:
    """Numbers, which are means over the microbatch, as parts of the mean over the batch."""
    if weight == 1.0:
        return value
    if isinstance(value, Mapping):
        return {name: _weighed_for_lightning(each, weight) for name, each in value.items()}
    return value * weight if isinstance(value, Tensor) and not value.dim() else value


def _put_together_in_lightning(value: Any, told: list[_Options], *, whole: bool) -> Tensor:
    """What was logged in the microbatches as the batch's."""
    outputs: list[Tensor] = list(value)
    if whole:
        return outputs[0]
    sizes = [each.size for each in told if each.size]
    if len(sizes) == len(outputs):
        weighed = [size * each for size, each in zip(sizes, outputs, strict=True)]
        mean: Tensor = torch.stack(weighed).sum() / sum(sizes)
        return mean
    return put_together(outputs, told[0].rule)


def _map_numbers(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """A step's output with `function(name, number)` in place of every number, a tensor or not."""
    if isinstance(value, Mapping):
        return {key: _map_numbers(each, f"{name}[{key!r}]", function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_numbers(each, f"{name}[{index}]", function) for index, each in enumerate(value))
    is_number = not value.dim() if isinstance(value, Tensor) else type(value) in (int, float)
    return function(name, value) if is_number else value


def _like(value: Any, exact: Tensor) -> Any:
    """The number of a batch in the form of a microbatch's."""
    return exact.to(value.dtype) if isinstance(value, Tensor) else type(value)(exact)


def _mean_of_outputs(value: Any, *, whole: bool) -> Any:
    """Outputs of the microbatches joined to the batch's; numbers are averaged."""
    if isinstance(value, smp.StepOutput) and not value[0].dim():
        return value[0] if whole else value.reduce_mean()
    if isinstance(value, Mapping):
        return {name: _mean_of_outputs(each, whole=whole) for name, each in value.items()}
    if isinstance(value, list) and not any(isinstance(each, smp.StepOutput) for each in value):
        return value[0] if value else None  # no tensor: one for each microbatch
    return joined(value, whole=whole)


def _lightning_module(strategy: Strategy) -> LightningModule:
    module = strategy.lightning_module
    assert module is not None, "Lightning has connected it"
    return module


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What chooses its samples: for predictions, Lightning makes loaders anew, around batches of it."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _lightning_replica() -> tuple[int, int]:
    """Which of how many replicas of the data this rank belongs to."""
    if smp.state.cfg.prescaled_batch:
        return smp.rdp_rank(), smp.rdp_size()
    return smp.dp_rank(), smp.dp_size()


def _lightning_replicas() -> Any:
    return smp.get_rdp_process_group() if smp.state.cfg.prescaled_batch else smp.get_dp_process_group()


def _check_module(module: LightningModule, name: str | None, precision: Precision) -> str:
    """The name of the network. Raises ConfigUnsupportedError for features that a pipeline cannot support."""
    wrong = []
    trained = [child for child, each in module.named_children() if any(True for _ in each.parameters())]
    own = [each for each, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if name is None and len(trained) == 1:
        name = trained[0]
    if name not in dict(module.named_children()):
        wrong.append(
            f"network: expected the name of the child that has the parameters, one of {', '.join(trained) or 'none'}, found {name!r}; put "
            "what is trained into one child, and name it: PipelineStrategy(config, network='model')"
        )
    elif outside := [*own, *(each for each in trained if each != name)]:
        wrong.append(
            f"{', '.join(outside)}: parameters and buffers outside of {name!r}; a pipeline trains one child of the module"
        )
    if not module.automatic_optimization:
        wrong.append("automatic_optimization: not False with a pipeline, which runs forwards and backwards interleaved")
    if type(precision) is not Precision:
        wrong.append(
            f"precision: expected '32-true', found {precision.precision!r}; set bf16: true or fp16: true in the configuration, which keeps "
            "fp32 masters"
        )
    if smp.cp_size() > 1:
        wrong.append(
            f"context_parallel_degree: expected 1 with Lightning, found {smp.cp_size()}; use a loop of your own, as in "
            "docs/context_parallelism.md"
        )
    if smp.tp_size() > 1 and not smp.state.cfg.prescaled_batch:
        wrong.append(
            "prescaled_batch: expected true with tensor_parallel_degree above 1, whose ranks get the same batch"
        )
    if wrong:
        raise ConfigUnsupportedError("\n".join(["PipelineStrategy:", *wrong]))
    return str(name)
