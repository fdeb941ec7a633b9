"""The optimizers that have a name, and the bytes that they keep for every element of a trained parameter.

    find_optimizer("adamw-fp32-master")

    own         tensors of the parameter's own dtype
    float32     tensors in float32
    master      a float32 copy of a parameter that has less precision; a float32 parameter is its own master
    main_grad   gradients are summed in a float32 buffer that stays, beside those that a backward pass yields
    wide_grad   gradients are float32, and are there from the first backward pass on

torch.optim keeps its state in the dtype of the parameters: `adam` on bfloat16 parameters has two bfloat16 moments. Names
that end in -fp32-master are what mixed-precision training adds: moments and a master copy in float32.

                            float32 parameter    bfloat16 parameter        bytes of state for one element
    sgd                     0                    0
    sgd-momentum            4                    2
    adam, adamw             8                    4
    adamw-fp32-master       8                    12

With data-parallel replicas (`Optimizer.replicated`) a rank also holds the buckets in which gradients are summed: a second copy of the
gradients, except for experts', which are summed at the end of a step. If the state is sharded over the replicas, a rank holds its part of
it alone:

    find_optimizer("adamw-fp32-master").replicated(8, sharded=True)        1.5 + 2 bytes for a bfloat16 element: state, bucket

With `fully_shard` parameters and gradients are in parts, too, but in a step it has whole ones beside its parts, from the first forward
of a stage to the end of its last backward (`smpc.executor.replicas.fully_shard`):

    find_optimizer("adamw-fp32-master").fully_sharded(8)       0.25 + 2 bytes of parameters, 2 of gradients, 1.5 of state
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from smpc.errors import ConfigError

if TYPE_CHECKING:
    from smpc.tracer.ir import TensorSpec

# Of gradients that are summed when a step is over: bytes from which one is summed in place, and of a message of smaller ones at most, as
# in `smpc.sharding.whole_parameters`.
ALONE, TOGETHER = 1 << 20, 1 << 25


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's state: see the module docstring."""

    name: str
    own: int = 0
    float32: int = 0
    byte: int = 0  # tensors of one byte for each element
    master: bool = False
    main_grad: bool = False
    wide_grad: bool = False
    scratch: int = 0  # tensors that a step makes and drops, in the dtype of what it updates
    shards: int = 1  # ranks that the state is split over
    buckets: bool = False  # gradients have a copy in buckets that are summed over replicas
    in_parts: bool = False  # parameters and gradients are split over these ranks, too
    at_end: bool = False  # gradients are summed over replicas once a step is over, small ones in messages

    def parameter_bytes(self, spec: TensorSpec) -> int:
        """Bytes of a parameter in a step: of the whole, and of the part that stays."""
        return self.gathered_bytes(spec) + self.part_bytes(spec) if self.in_parts else spec.num_bytes

    def part_bytes(self, spec: TensorSpec) -> int:
        """Bytes of what this rank keeps of a parameter: rows, as many on each of the ranks; all of one without dimensions."""
        if not self._divides(spec) or not spec.num_elements:
            return spec.num_bytes
        return -(-spec.shape[0] // self.shards) * (spec.num_bytes // spec.shape[0])

    def gathered_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the parts of all ranks together, if a parameter is sharded."""
        return self.shards * self.part_bytes(spec) if self._divides(spec) else 0

    def _divides(self, spec: TensorSpec) -> bool:
        return self.in_parts and bool(spec.shape)

    def apart_bytes(self, spec: TensorSpec) -> int:
        """Bytes of gradients that wait for the end of their backward pass, if their sum is a separate float32 tensor."""
        return spec.num_bytes if self.in_parts and self.wide_grad and _is_narrow(spec) else 0

    def state_bytes(self, spec: TensorSpec) -> int:
        """Bytes of state of a trained parameter, buckets included."""
        copies = self.float32 + (self.master and _is_narrow(spec))
        whole = self.own * spec.num_bytes + (4 * copies + self.byte) * spec.num_elements
        return -(-whole // self.shards) + self.buckets * self._summed_bytes(spec)

    def master_gradient_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the float32 copy of the gradient that a step makes for the master of a trained parameter."""
        makes = self.master and not self.main_grad and _is_narrow(spec)
        return -(-4 * spec.num_elements // self.shards) if makes else 0

    def temporary_bytes(self, spec: TensorSpec) -> int:
        """Bytes of what a step makes and drops while it updates a trained parameter, or its master."""
        return self.scratch * (4 * spec.num_elements if self.master and _is_narrow(spec) else spec.num_bytes)

    def replicated(self, num_replicas: int, sharded: bool = False) -> Optimizer:
        """The same on a rank that is one of several replicas; `sharded`: they split the state among them."""
        if num_replicas == 1:
            return self
        shards, name = (num_replicas, f"{self.name}, sharded over {num_replicas}") if sharded else (1, self.name)
        return replace(self, name=name, shards=shards, buckets=True)

    def summed_at_end(self, num_replicas: int, sharded: bool = False) -> Optimizer:
        """The same of what replicas sum when the last backward has ended, such as experts: without buckets."""
        found = self.replicated(num_replicas, sharded)
        return found if num_replicas == 1 else replace(found, buckets=False, at_end=True)

    def fully_sharded(self, num_replicas: int) -> Optimizer:
        """The same on a rank that is one of several replicas, which split parameters and gradients as well."""
        return self if num_replicas == 1 else self.in_parts_on(num_replicas)

    def in_parts_on(self, num_ranks: int) -> Optimizer:
        """The same where each of these ranks has a part, though it be one rank: what is gathered is a copy then, too."""
        return replace(self, name=f"{self.name}, fully sharded over {num_ranks}", shards=num_ranks, in_parts=True)

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the gradient of a trained parameter."""
        main = 4 * spec.num_elements if self.main_grad and _is_narrow(spec) else 0
        return self._summed_bytes(spec) + main

    def message_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the copy of a trained parameter's gradient that is sent with others."""
        whole = self._summed_bytes(spec)
        return whole if self.at_end and whole < ALONE else 0

    def _summed_bytes(self, spec: TensorSpec) -> int:
        return 4 * spec.num_elements if self.wide_grad and _is_narrow(spec) else spec.num_bytes


def _is_narrow(spec: TensorSpec) -> bool:
    return spec.torch_dtype.itemsize < 4


ADAM = Optimizer("adam", own=2, scratch=1)
OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (
            Optimizer("sgd"),
            Optimizer("sgd-momentum", own=1),
            Optimizer("sgd-momentum-fp32-master", float32=1, master=True),
            Optimizer("adagrad", own=1, scratch=1),
            Optimizer("rmsprop", own=1, scratch=1),
            Optimizer("lion", own=1),
            ADAM,
            Optimizer("adamw", own=2, scratch=1),
            Optimizer("adamw-8bit", byte=2),
            Optimizer("adam-fp32-master", float32=2, master=True, scratch=1),
            Optimizer("adamw-fp32-master", float32=2, master=True, scratch=1),
            Optimizer("adamw-fp32-master-fp32-grad", float32=2, master=True, main_grad=True),
            Optimizer("adam-fp32-master-wide-grad", float32=2, master=True, wide_grad=True, scratch=1),
            Optimizer("adamw-fp32-master-wide-grad", float32=2, master=True, wide_grad=True, scratch=1),
        )
    }
)


def find_optimizer(name: str | Optimizer) -> Optimizer:
    """The optimizer of that name; ConfigError names the closest one if there is none."""
    if isinstance(name, Optimizer):
        return name
    if name.lower() in OPTIMIZERS:
        return OPTIMIZERS[name.lower()]
    close = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, found {name!r}{hint}")
