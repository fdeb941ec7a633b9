"""Values that must be equal on ranks, checked or shared: on all ranks, or on the ranks that slice layers together."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.optim import Optimizer

from smpc import dist
from smpc.checkpoint.rng import capture_rng, restore_rng
from smpc.composer.microbatches import tensors_of
from smpc.errors import ConfigError

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
    own = {name: repr(_plain(value)) for name, value in given.items() if name not in (*_OWN, *_LOADERS)}
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


def _plain(value: Any) -> Any:
    """The compared part of a value: plain values, also inside dictionaries, and the classes of others."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in sorted(value.items(), key=lambda item: str(item[0]))}
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
