"""What stands for a value in a recording: the node that returned it, the node that reads it from the model, or a constant.

    x, weight, [2, mask], torch.device("cpu")   ->   Ref("add"), Ref("weight"), [2, Ref("mask")], TraceDevice()

A parameter, a buffer and a generator of the model's get the node that reads them when they are first used. A tensor that outlives the
run and that no module holds is a constant, made again for each use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from smpc.tracer.constants import Opaque, Ref, TraceDevice, is_constant, normalise
from smpc.tracer.effects import torch_calls
from smpc.tracer.effects.randomness import HOLD_GENERATOR
from smpc.tracer.ir import Node, NodeKind, TensorSpec
from smpc.tracer.operations.left_behind import RETURN_IT
from smpc.tracer.recording.node_tables import Identities, NodeNames
from smpc.tracer.recording.untraceable import UntraceableError

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder


class References:
    """Of one recording. `drawn`: the nodes that read generators. `outside`: constants that stand for tensors which outlive the run."""

    def __init__(self, recorder: Recorder, tensors: Identities, names: NodeNames) -> None:
        self._recorder, self._tensors, self._names = recorder, tensors, names
        self._attributes: dict[str, str] = {}  # FQN -> node that reads it
        self.drawn: dict[str, None] = {}
        self.outside: dict[str, None] = {}

    def tree(self, value: Any, where: str) -> Any:
        """An argument with its tensors replaced by `Ref`s."""
        if type(value) in (tuple, list):
            return type(value)(self.tree(item, where) for item in value)
        if isinstance(value, tuple):
            return tuple(self.tree(item, where) for item in value)
        if isinstance(value, dict):
            return {key: self.tree(item, where) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self.tree(item, where) for item in (value.start, value.stop, value.step)))
        return self.argument(value, where)

    def argument(self, leaf: Any, where: str | None) -> Any:
        """A Ref or a constant. Any other value is an error, or `Opaque` without a `where` to blame."""
        if isinstance(leaf, torch.Tensor):
            if where is None and not self._recorder.known(leaf):
                return Opaque("tensor")
            return Ref(self.name(leaf, where or ""))
        if isinstance(leaf, torch.Generator) and self._recorder.generators.path(leaf):
            return Ref(self.generator(leaf))
        leaf = normalise(leaf)
        if isinstance(leaf, torch.device) and leaf.type == self._recorder.device.type:
            return TraceDevice()
        if is_constant(leaf):
            return leaf
        if where is None:
            return Opaque(type(leaf).__name__)
        if isinstance(leaf, torch.Generator):
            raise self._recorder.error(f"{where} is a torch.Generator that no module holds", way_out=HOLD_GENERATOR)
        raise self._recorder.error(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which a trace cannot hold"
        )

    def generator(self, generator: torch.Generator) -> str:
        """The node that reads a generator which a module holds."""
        path = self._recorder.generators.path(generator)
        if path not in self._attributes:
            self.drawn[self._new_attribute(path, None, self._tensors.new_storage(0))] = None
        return self._attributes[path]

    def _new_attribute(self, fqn: str, spec: TensorSpec | None, storage: int) -> str:
        self._attributes[fqn] = name = self._names.unique(re.sub(r"\W+", "_", fqn).strip("_"))
        self._recorder.nodes.append(
            Node(name, NodeKind.GET_ATTR, fqn, spec=spec, storage=storage, call=self._recorder.call_index)
        )
        return name

    def name(self, tensor: torch.Tensor, where: str) -> str:
        """The node whose value a tensor is."""
        found = self._tensors.node_of(tensor)
        if found:
            return found
        fqn = self._recorder.state.names.get(id(tensor))
        self._recorder.watch.read(tensor, self._recorder.open[1:])
        if fqn is None:
            if torch_calls.constant(tensor) is None:
                raise self.unknown(tensor, where)
            name = self._recorder.add_constant(tensor, tensor)
            self._recorder.attributes.note_outside([tensor])
            self._tensors.forget(tensor)  # a global, made again for each use, so that modules stay intact
            self.outside[name] = None
            return name
        if fqn not in self._attributes:
            self._new_attribute(fqn, TensorSpec.of(tensor), self._tensors.storage(tensor))
        return self._attributes[fqn]

    def unknown(self, tensor: torch.Tensor, where: str) -> UntraceableError:
        """The error for a tensor of which nobody knows where it comes from."""
        if self._recorder.left.text(tensor):
            return self._recorder.error(f"{where} is {self._recorder.left.text(tensor)}", way_out=RETURN_IT)
        return self._recorder.error(f"{where} is a tensor {tuple(tensor.shape)} that {torch_calls.why_unknown(tensor)}")
