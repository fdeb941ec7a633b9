"""Batches of a Trainer's ranks: cut into microbatches, and checked to be alike where ranks slice layers together.

`cut` cuts a batch along its samples: tensors in tuples, lists and mappings along their first dimension; what is no tensor goes to all, but
for lists without tensors that have as many members as there are samples: texts, names, and the like.

An object with `smp_slice(num_pieces, index, axis)`, as of `smpc.v1`, cuts itself along axis 0, into equal pieces.

num_samples({"ids": tensor of 10 rows}) == 10
cut(batch, 4)       microbatches of 4, 4 and 2 samples

`check_alike`, `check_same_batch` and `share_random_state` check or share values that must be equal: on all ranks, or on the ranks that
slice layers together.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from smpc import dist
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.containers import rebuilt
from smpc.errors import ConfigError

_LEFT_OUT = -100  # what torch.nn.functional.cross_entropy ignores


def num_samples(batch: Any) -> int:
    """How many samples a batch has. Raises ConfigError where its tensors do not agree, or where it has none."""
    sizes = sorted(set(_batch_sizes(batch)))
    if len(sizes) != 1:
        raise ConfigError(
            f"batch: expected tensors with one number of rows in a {type(batch).__name__}, found "
            f"{', '.join(map(str, sizes)) or 'no tensor'}"
        )
    return sizes[0]


def num_tokens(batch: Any) -> int:
    """The elements of `input_ids`, else of the batch's first integer tensor of two dimensions; 0 without one."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].numel())
    found = (tensor for tensor in tensors_of(batch) if tensor.dim() == 2 and not tensor.is_floating_point())
    return next((tensor.numel() for tensor in found), 0)


def num_loss_tokens(batch: Any) -> int:
    """What a loss is a mean over: the entries of `labels` but for -100, which losses leave out; `num_tokens` without labels of classes."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point():
        return int((labels != _LEFT_OUT).sum())
    return num_tokens(batch)


def cut(batch: Any, size: int | None) -> list[Any]:
    """The batch in pieces of `size` samples, of which the last one may be smaller; whole for None.

    Raises ConfigError where an object cuts itself, and `size` does not divide the batch.
    """
    total = num_samples(batch)
    if size is None or size >= total:
        return [batch]
    return [_microbatch_of(batch, start, size, total) for start in range(0, total, size)]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return rebuilt(batch, [moved(value, device) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return rebuilt(batch, [moved(value, device) for value in batch])
    return batch.to(device) if hasattr(batch, "to") else batch


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order, without tensors of no dimension."""
    if isinstance(batch, Tensor):
        return [batch] if batch.dim() else []
    values = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def _batch_sizes(batch: Any) -> list[int]:
    """The first dimension of every tensor of a batch."""
    if isinstance(batch, Mapping):
        return [size for value in batch.values() for size in _batch_sizes(value)]
    if isinstance(batch, tuple | list):
        return [size for value in batch for size in _batch_sizes(value)]
    return [batch.shape[0]] if isinstance(batch, Tensor) and batch.dim() else []


def _microbatch_of(batch: Any, start: int, size: int, total: int) -> Any:
    """The samples from `start` on of a batch."""
    if hasattr(batch, "smp_slice"):
        if total % size:
            raise ConfigError(
                f"batch: expected microbatches of a size that divides the {total} samples, as {type(batch).__name__} cuts itself into "
                f"equal pieces, found device_train_microbatch_size {size}"
            )
        return batch.smp_slice(total // size, start // size, 0)
    if isinstance(batch, Mapping):
        return rebuilt(batch, [_microbatch_of(value, start, size, total) for value in batch.values()])
    if isinstance(batch, list) and len(batch) == total and not _batch_sizes(batch):
        return batch[start : start + size]
    if isinstance(batch, tuple | list):
        return rebuilt(batch, [_microbatch_of(value, start, size, total) for value in batch])
    return batch[start : start + size] if isinstance(batch, Tensor) and batch.dim() else batch


_OWN = (  # what a rank may have for itself
    "model", "optimizers", "schedulers", "callbacks", "seed", "save_folder", "load_path", "device", "dist_timeout",
)  # fmt: skip
_LOADERS = ("train_dataloader", "eval_dataloader")


def check_alike(given: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError on all ranks, if arguments, parameters, or options of the optimizer differ between them. Collective.

    Ranks would wait for each other, or train apart.
    """
    if dist.get_world_size() == 1:
        return
    own = {
        name: repr(_comparable_in_microbatches(value))
        for name, value in given.items()
        if name not in (*_OWN, *_LOADERS)
    }
    own |= {name: "none" if given[name] is None else "one" for name in _LOADERS}
    own |= {f"the parameter {name}": f"{p.dtype} {tuple(p.shape)}" for name, p in model.named_parameters()}
    own["optimizers"] = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        own[f"optimizers, group {index}"] = f"{len(group['params'])} parameters"
        own |= {
            f"optimizers, group {index}, {key}": repr(value)
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | None | tuple)
        }
    checksums = dist.all_gather(torch.tensor([zlib.crc32(repr(own).encode())]))
    if len({int(checksum) for checksum in checksums}) == 1:
        return
    found: list[dict[str, str]] = dist.all_gather_object(own)
    names = dict.fromkeys(name for each in found for name in each)
    wrong = [name for name in names if len({each.get(name) for each in found}) > 1]
    lines = [
        f"{name}: " + ", ".join(f"{each.get(name, 'nothing')} on rank {rank}" for rank, each in enumerate(found[:8]))
        for name in wrong[:8]
    ]
    raise ConfigError("expected the same on all ranks, found\n" + "\n".join(lines or ["parameters in another order"]))


def _comparable_in_microbatches(value: Any) -> Any:
    """The compared part of a value: plain values, also inside dictionaries, and the classes of others."""
    if isinstance(value, Mapping):
        return {
            str(key): _comparable_in_microbatches(inner)
            for key, inner in sorted(value.items(), key=lambda item: str(item[0]))
        }
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def check_same_batch(batch: Any, group: ProcessGroup | None) -> None:
    """Raise ConfigError, unless all ranks of the group have the same tensors in their batches. Collective; nothing without a group."""
    if group is None:
        return
    checksum = 0
    for tensor in tensors_of(batch):
        plain = tensor.detach().cpu().contiguous()
        checksum = zlib.crc32(f"{plain.dtype}{tuple(plain.shape)}".encode(), checksum)
        checksum = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    found = [int(each) for each in dist.all_gather(torch.tensor([checksum]), group)]
    if len(set(found)) > 1:
        ranks = ", ".join(map(str, get_process_group_ranks(group)))
        raise ConfigError(
            f"batch: expected the same one on ranks {ranks}, which slice layers together, found several; let their data loaders read the "
            "same samples in one order"
        )


def share_random_state(group: ProcessGroup) -> None:
    """Give all ranks of the group the random state of its first one: what is not sliced is dropped alike. Collective."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state: list[Any] = [capture_rng() | {"cuda": []}, torch.cuda.get_rng_state() if in_use else None]
    dist.broadcast_object_list(state, get_process_group_ranks(group)[0], group)
    restore_rng(state[0])
    if in_use:  # of the device that this process has, whatever its number
        torch.cuda.set_rng_state(state[1])
