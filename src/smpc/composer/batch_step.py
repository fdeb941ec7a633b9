"""One batch on all ranks: microbatches, averages, and a size that fits into memory.

n(r, j) samples in microbatch j of rank r, N in all, R ranks: a mean loss is weighted n(r, j) R / N, and the ranks' gradients are averaged.
So every cut, uneven ones too, gives the gradient of the mean over samples.

    how gradients are averaged      when                              used for
    DistributedDataParallel         in the last backward              replicas
    fully_shard                     in every backward                 `fsdp_config`
    by hand                         after the last backward           forced_sync, and automatic sizes: nothing waits inside a microbatch

Automatic size: if a rank runs out of memory in forward or backward, all ranks learn of it: after the microbatches and, in sharded models,
before each collective call (`smpc.sharding.out_of_memory`). All then halve the size, drop their gradients, restore random generators,
buffers and units, and run the batch again. Only gradients of the final size are averaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from smpc import dist
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.composer.checkpoint import LossScale, State
from smpc.composer.microbatches import cut, num_loss_tokens, num_samples, num_tokens
from smpc.composer.model import ComposerModel
from smpc.errors import ConfigError, PeerMemoryError, StepError, TransportError
from smpc.executor.replicas.forward_writes import ForwardWrites
from smpc.fsdp import Prepared
from smpc.fsdp.tensor_slices import check_gradients
from smpc.sharding.dtensors import updating_parts, whole
from smpc.sharding.out_of_memory import Agreement

_LOG = logging.getLogger("smpc.composer")
_DTYPES = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}
_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)


@dataclass(slots=True)
class Stepper:
    """Runs batches. `wrap` makes what is called for the model; `by_hand`: whether gradients are averaged after the microbatches.

    `agreement`: how ranks tell that memory was not enough, with automatic sizes. `upcoming`: samples, tokens, and tokens that count in
    the loss, of the batch that comes next, a row for each rank.
    """

    state: State
    wrap: Callable[[], Any]
    prepared: Prepared | None
    precision: str
    device: torch.device
    scale: LossScale | None
    clipping: float | None
    by_hand: bool
    agreement: Agreement | None
    syncs_each: bool
    by_tokens: bool
    upcoming: Tensor | None = None
    wrapped: Any = field(init=False)
    _trained: tuple[bool, ...] = field(init=False)  # when it was wrapped
    _has_checked: bool = False
    _writes: ForwardWrites | None = None
    _world_size: int = field(default_factory=dist.get_world_size)

    def __post_init__(self) -> None:
        self.wrapped, self._trained = self.wrap(), self._trained_now()
        if self.prepared is None and self._world_size > 1:
            named = self.state.model.named_parameters(remove_duplicate=False)
            every = distributed.group.WORLD
            assert every is not None, "there are several ranks"
            self._writes = ForwardWrites(named, every)

    def _trained_now(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self.state.model.parameters())

    def _follow(self) -> None:
        """Wrap the model anew if others of its parameters train now: replicas average those alone that trained when it was wrapped."""
        trained = self._trained_now()
        if trained == self._trained:
            return
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.reducer._remove_autograd_hooks()
        self.wrapped, self._trained = self.wrap(), trained

    @property
    def tensor_group(self) -> ProcessGroup | None:
        """The ranks that slice layers together with this one, and train on the same samples; None if none are sliced."""
        return None if self.prepared is None else self.prepared.tensor_group

    def begin(self) -> None:
        """Data are begun: what comes next is not known."""
        self.upcoming = None

    def run(self, batch: Any, following: Any | None) -> tuple[int, int]:
        """Train on a batch; (samples, tokens) on all ranks. `following`: the next batch of the epoch, None for its last. Collective.

        Beside the gradients there is one exchange: of losses, and of how much of the following batch each rank has. It is under way from
        the last forward on: nothing of it is needed for the backward and the update.
        """
        self._follow()
        if self._writes is not None:
            self._writes.begin()
        counts = self.upcoming if self.upcoming is not None else self._first(batch)
        total, tokens = int(counts[:, 0].sum()), int(counts[:, 1].sum())
        begun: list[_NumberExchange] = []

        def exchange(loss: Tensor) -> None:
            begun.append(_NumberExchange(loss, (*_sizes_in_step(following), int(following is None))))

        if self.agreement is not None:
            exchange(self._search(batch, counts, self.agreement))
        else:
            self._microbatches(batch, self.state.device_train_microbatch_size, counts, exchange)
        if self.by_hand:
            average(self.state.model)
        if self._writes is not None:
            self._writes.end()
        self._update()
        told = begun[0].told()
        _check_alike(told[:, 4], "the end of their data together")
        self.upcoming = None if following is None else _checked_counts_of_step(told[:, 1:4])
        self.state.loss = float(told[:, 0].sum())
        copies = 1 if self.tensor_group is None else self.tensor_group.size()
        return total // copies, tokens // copies

    def _first(self, batch: Any) -> Tensor:
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        told = _NumberExchange(nothing, (*_sizes_in_step(batch), self.state.timestamp.batch)).told()
        _check_alike(told[:, 4], "the same batch")
        return _checked_counts_of_step(told[:, 1:4])

    def _microbatches(
        self, batch: Any, size: int | None, counts: Tensor, known: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Forward and backward of all; this rank's share of the mean loss, which `known` is given before the last backward."""
        pieces = cut(batch, size)
        most = max(-(-int(n) // size) if size else 1 for n in counts[:, 0])
        weights = [self._weight(piece, counts) for piece in pieces]
        if self.prepared is not None:  # every backward is collective
            weights += [0.0] * (most - len(pieces))
            pieces += [pieces[-1]] * (most - len(pieces))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            is_last = index == len(pieces) - 1
            with self._sync(is_last=is_last):
                loss = self._weighted(piece, weight)
                loss_sum += loss.detach().double() / self._world_size
                if is_last and known is not None:
                    known(loss_sum)
                (loss if self.scale is None else loss * self.scale.factor).backward()  # type: ignore[no-untyped-call]
        self._check_all_averaged()
        return loss_sum

    def _check_all_averaged(self) -> None:
        """Raise StepError, before the update, if replicas wait for gradients of parameters that nothing has used."""
        if not isinstance(self.wrapped, DistributedDataParallel):
            return
        try:
            self.wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            unused = [
                name.removeprefix("module.")
                for name, parameter in self.wrapped.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ]
            raise StepError(
                f"replicas: expected every parameter that trains to be used in every batch, found {', '.join(unused[:5]) or 'some'} "
                "without a gradient, so that gradients were not averaged; pass ddp_sync_strategy='multi_auto_sync' to the Trainer, or "
                "freeze what the model does not use"
            ) from error

    def _weighted(self, piece: Any, weight: float) -> Tensor:
        with self._autocast():
            loss = _total_loss(self.state.model.loss(self.wrapped(piece), piece))
        weighted = loss * weight if weight != 1.0 else loss
        if not weight:  # nothing counts, and the mean over nothing is NaN
            weighted = torch.where(loss.isfinite(), weighted, 0.0)
        return weighted

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        low = _DTYPES.get(self.precision)
        return torch.autocast(self.device.type, low, enabled=low is not None)  # of fp32: none around fit either

    def mean_loss(self, batch: Any) -> Tensor:
        """The loss of a batch of the evaluation, in the precision of the training."""
        with self._autocast():
            return _total_loss(self.state.model.loss(self.state.model.eval_forward(batch), batch))

    def _weight(self, piece: Any, counts: Tensor) -> float:
        own = num_loss_tokens(piece) if self.by_tokens else num_samples(piece)
        total = int(counts[:, 2 if self.by_tokens else 0].sum())
        if total == 0:
            raise StepError(
                "accumulate_train_batch_on_tokens: expected batches with tokens, found none in input_ids, or labels of -100 alone"
            )
        return own * self._world_size / total

    @contextlib.contextmanager
    def _sync(self, *, is_last: bool) -> Iterator[None]:
        if isinstance(self.wrapped, DistributedDataParallel) and not is_last and not self.syncs_each:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def _search(self, batch: Any, counts: Tensor, agreement: Agreement) -> Tensor:
        """Run the microbatches, at a size that fits on all ranks."""
        rng, buffers = capture_rng(), [buffer.clone() for buffer in self.state.model.buffers()]
        largest = int(counts[:, 0].max())
        while True:
            size = min(self.state.device_train_microbatch_size or largest, largest)
            loss, error = torch.zeros((), dtype=torch.float64, device=self.device), None
            try:
                with agreement.watched():
                    loss = self._microbatches(batch, size, counts)
                failed = agreement.tell(False)
            except PeerMemoryError:
                failed = True
            except (RuntimeError, MemoryError) as caught:
                if not is_out_of_memory(caught):
                    raise
                error = str(caught).splitlines()[0]
            if error is not None:  # outside the except block, which keeps tensors of the failed pass alive
                failed = agreement.tell(True)
            if not failed:
                return loss
            self._again(batch, size, error, rng, buffers)
            agreement.recover()

    def _again(
        self, batch: Any, size: int, error: str | None, rng: Mapping[str, Any], buffers: Sequence[Tensor]
    ) -> None:
        """Halve the size, and put everything back to where the batch began."""
        self.state.optimizer.zero_grad(set_to_none=True)
        restore_rng(rng)
        with torch.no_grad():
            for buffer, before in zip(self.state.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if size == 1:
            raise StepError(
                f"out of memory with microbatches of one sample, {_batch_shapes(cut(batch, 1)[0])}"
                f"{f': {error}' if error else ' on another rank'}; shard the model with fsdp_config, or recompute activations"
            )
        self.state.device_train_microbatch_size = (size + 1) // 2
        _LOG.warning(
            "out of memory%s: device_train_microbatch_size %d -> %d, the batch is run again",
            "" if error else " on another rank",
            size,
            (size + 1) // 2,
        )

    def _update(self) -> None:
        optimizer = self.state.optimizer
        if self.prepared is not None and self.tensor_group is not None and not self._has_checked:
            check_gradients(self.prepared.model, self.prepared.mesh)
            self._has_checked = True
        if self.scale is not None and not self.scale.unscale(optimizer):
            optimizer.zero_grad(set_to_none=True)
            return
        if self.clipping is not None:
            updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if self.prepared is not None:
                self.prepared.clip(self.clipping, updated)
            else:
                torch.nn.utils.clip_grad_norm_(updated, self.clipping)
        with updating_parts(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _sizes_in_step(batch: Any | None) -> tuple[int, int, int]:
    return (0, 0, 0) if batch is None else (num_samples(batch), num_tokens(batch), num_loss_tokens(batch))


class _NumberExchange:
    """The exchange of each rank's numbers: loss, samples, tokens, tokens that count in the loss, values that must be equal. Collective."""

    def __init__(self, loss: Tensor, numbers: tuple[int, ...]) -> None:
        own = torch.tensor([0.0, *numbers], dtype=torch.float64, device=loss.device)
        own[0] = loss
        self._all, self._work = [own], None
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            self._all = list(own.new_empty(distributed.get_world_size(), len(own)))
            self._work = distributed.all_gather(self._all, own, async_op=True)

    def told(self) -> Tensor:
        """A row for each rank, on the CPU."""
        if self._work is not None:
            self._work.wait()
        return torch.stack(self._all).cpu()


def _check_alike(column: Tensor, what: str) -> None:
    values = [int(value) for value in column]
    if len(set(values)) > 1:
        behind = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise TransportError(f"expected all ranks at {what}, found {behind}; give every rank as many batches")


def _checked_counts_of_step(counts: Tensor) -> Tensor:
    if int(counts[:, 0].min()) < 1:
        raise ConfigError("batch: expected at least one sample on every rank")
    return counts


def _total_loss(loss: Any) -> Tensor:
    """The scalar that is differentiated, of what a loss function returns."""
    if isinstance(loss, Mapping):
        if "total" not in loss:
            raise StepError(f"loss: expected the key total in a dict, found {', '.join(map(str, loss))}")
        loss = loss["total"]
    if isinstance(loss, tuple | list):
        loss = sum(loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"loss: expected a tensor with one element, a tuple of such, or a dict with total, found {type(loss).__name__}"
        )
    return whole(loss).reshape(())


def _batch_shapes(batch: Any) -> str:
    """The shapes of the tensors of a batch, as text."""
    if isinstance(batch, Tensor):
        return str(tuple(batch.shape))
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return ", ".join(_batch_shapes(value) for value in values)


@torch.no_grad()
def average(model: ComposerModel) -> None:
    """Average the gradients of replicas in one flat tensor for each dtype. A gradient that some ranks lack counts as zero there."""
    size = dist.get_world_size()
    if size == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    has = torch.tensor([int(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    dist.all_reduce(has, "MAX")
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, any_has in zip(trained, has.tolist(), strict=True):
        if any_has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in groups.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(size)
        dist.all_reduce(flat)
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
