"""Calls of leaf modules, each of which becomes one node: what it returns, writes and keeps for the backward, on fakes or, where those
will not do, on invented values (`smpc.tracer.operations.opaque`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smpc.tracer.effects.randomness import generators_of
from smpc.tracer.effects.torch_calls import tensors_in, version_of
from smpc.tracer.ir import Node, NodeKind
from smpc.tracer.operations.meter import touched_bytes
from smpc.tracer.operations.opaque import Probe, Probes, fake_of, shape_rule
from smpc.tracer.operations.whole_call import WholeAttributes, WholeCall
from smpc.tracer.recording.node_tables import Identities, NodeNames
from smpc.tracer.recording.untraceable import innermost_line
from smpc.tracer.structure import flatten

if TYPE_CHECKING:
    from smpc.tracer.recording.recorder import Recorder

_SHAPE_RULE = "what to do: give the shapes of what it returns with smpc.register_shape_rule"


class LeafCalls:
    """The leaf calls of one recording."""

    def __init__(self, recorder: Recorder, tensors: Identities, names: NodeNames) -> None:
        self._recorder, self._tensors, self._names = recorder, tensors, names
        self._probes = Probes()

    def call(
        self, fqn: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one, by `run` if fakes will do, and adds its node."""
        where = f"leaf module {fqn}"
        self._recorder.sizes.refuse((args, kwargs))
        self._recorder.left.take_back(fqn)
        node_args, node_kwargs = self._recorder.arguments(where, args, kwargs)
        watched = (*tensors_in((args, kwargs)), *module.parameters(), *module.buffers())
        before = [(tensor, version_of(tensor)) for tensor in watched]
        self._recorder.begin_call()
        is_python = not isinstance(module, torch.jit.ScriptModule)
        with (
            self._recorder.watch.whole(fqn, module, (args, kwargs), self._recorder.run) as whole,
            self._recorder.inside_call(whole.torch_call if is_python else None),
        ):
            out, written = self._run_whole(whole, module, run, args, kwargs)
        self._recorder.attributes.restore()  # what it writes into its own, it writes when it is called
        with torch._C.DisableTorchFunction():
            written += whole.written
            self._recorder.watch.note_overwritten([self._tensors.storage(tensor) for tensor in written])
            written += whole.marked
            written += self._recorder.written(before)
            mutates = tuple(
                dict.fromkeys(self._recorder.references.name(tensor, f"an argument of {where}") for tensor in written)
            )
            mutates += tuple(
                dict.fromkeys(self._recorder.references.generator(generator) for generator in generators_of(module))
            )
            self._recorder.generators.changed()
            used = (*tensors_in((args, kwargs)), *tensors_in(out), *module.parameters())
            moved = sum(touched_bytes(tensor) for tensor in used)
            name = self._names.unique(re.sub(r"\W", "_", fqn))
            node = Node(name, NodeKind.CALL_MODULE, fqn, node_args, node_kwargs, bytes_moved=moved, mutates=mutates)
            self._recorder.add_measured(node, out)
            if whole.differentiates:
                self._recorder.differentiating.append(name)
        return out

    def _run_whole(
        self, whole: WholeCall, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """A leaf's outputs, as fakes, and its writes that version counters do not show."""
        rule = shape_rule(module)
        if rule is not None:
            return rule(module, *args, **kwargs), []
        attributes = WholeAttributes(self._recorder, whole, module)
        try:
            out = run()
        except Exception:  # fakes will not do: run it for real
            self._recorder.saved = []
        else:
            attributes.note_run(
                lambda: self._probes.of(module, args, kwargs, self._recorder.state, self._recorder.meter)
            )
            return out, []
        if whole.failure is not None:
            raise whole.failure
        whole.is_real = True
        try:
            found = self._probes.of(module, args, kwargs, self._recorder.state, self._recorder.meter)
        except Exception as error:
            what = f"{type(module).__name__} cannot be called whole either: {type(error).__name__}: {error}"
            raise self._recorder.error(what, line=innermost_line(error), way_out=_SHAPE_RULE) from error
        with torch._C.DisableTorchFunction():  # a look at parameters is no use of them
            return self._noted(whole, attributes, found, module, flatten((args, kwargs))[0])

    def _noted(
        self, whole: WholeCall, attributes: WholeAttributes, found: Probe, module: nn.Module, inputs: list[Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """The same, of a run for real."""
        whole.note_reached(found.reached)
        whole.note_changes(found.changes_arguments)
        tensors = [*tensors_in(inputs), *module.parameters(), *module.buffers()]
        self._recorder.meter.flops, self._recorder.meter.random = found.flops, found.random
        attributes.note(found)
        for position in found.kept:
            self._recorder.watch.note_kept(self._tensors.storage(tensors[position]))
        for position, num_bytes in found.saved:
            self._recorder.saved.append(
                self._tensors.storage(inputs[position]) if position >= 0 else self._tensors.new_storage(num_bytes)
            )
        leaves = [fake_of(leaf, inputs, tensors, self._recorder.device) for leaf in found.leaves]
        self._recorder.left.put(module, whole.fqn, found.left)
        return found.structure.unflatten(leaves), [tensors[i] for i in found.written]
