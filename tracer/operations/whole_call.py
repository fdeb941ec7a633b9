"""What a module that is called whole does beside returning values, found out while it runs over fakes.

A stage calls the module again, with the arguments that it was recorded with, on a rank that may hold nothing else. So all that it does
must happen inside:

    it uses        its arguments, and parameters, buffers and attributes of its own
    it marks       its arguments (hooks, requires_grad_): a write, so that they are made on the same stage
    it leaves      settings, torch's generator, and its parameters as they were
    it derives     what it has computed itself, by values that do not depend on each other outside: the graph between its arguments is
                   cut where a stage begins

Anything else is an error of the module around it, which is then called whole in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from smpc.errors import TraceError
from smpc.tracer.effects import differentiation
from smpc.tracer.effects.torch_calls import tensors_in, version_of, written_by
from smpc.tracer.state.attribute_memory import AttributeMemory
from smpc.tracer.structure import flatten

if TYPE_CHECKING:
    from smpc.tracer.effects.side_effects import EffectWatch
    from smpc.tracer.operations.opaque import Probe
    from smpc.tracer.recording.recorder import Recorder

Run = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
_RETURN = "what to do: have it return what it puts there"
_PASS = "what to do: pass it as an argument, or have the module hold it"
_BACKWARD = (
    "forward runs a backward that adds to the gradients of parameters, between those of other microbatches",
    "what to do: use torch.autograd.grad, or give backward the inputs to differentiate by",
)


class WholeCall:
    """One call of a module. `run` runs a torch call inside.

    written          arguments and tensors of the module that it writes into, by whatever name (`self.weight.data.mul_(2)`)
    marked           arguments that have other marks afterwards
    differentiates   whether it runs autograd inside
    is_real          whether it had to be run on invented values
    seeds            the function by which it seeds a generator, if it does; `is_forked`: after fork_rng
    generators       names of the generators that it gives to torch calls
    failure          what is wrong with it
    """

    def __init__(
        self, watch: EffectWatch, recorder: Recorder, fqn: str, module: nn.Module, arguments: Any, run: Run
    ) -> None:
        self._watch, self._recorder, self._module, self._run = watch, recorder, module, run
        self.fqn = fqn
        self._given = {id(leaf): leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)}
        current = frozenset(id(buffer) for buffer in module.buffers())
        self._own = watch.ownership.owned(module) | current
        self._flags = [(tensor, tensor.requires_grad) for tensor in (*module.parameters(), *module.buffers())]
        self._in_memory: dict[int, list[Tensor]] = {}  # by storage
        for tensor in (*self._given.values(), *module.parameters(), *module.buffers()):
            if tensor.layout is torch.strided:
                self._in_memory.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self.written: dict[Tensor, None] = {}
        self.marked: list[Tensor] = []
        self.differentiates = self.is_forked = self.is_real = False
        self.seeds = ""
        self.generators: dict[str, None] = {}
        self.failure: TraceError | None = None
        self.writes_attributes = False

    def refuse(self, why: str, way_out: str) -> NoReturn:
        """Raises an error of the module around, about what this one does."""
        what = f"module {self.fqn!r} ({type(self._module).__name__}) would be called whole, but {why}"
        self.failure = self._recorder.error(what, way_out=way_out)
        raise self.failure

    def torch_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a torch call and takes note of it."""
        with torch._C.DisableTorchFunction():
            self._note_used(args, kwargs)
            mark = differentiation.mark_of(func)
            if mark and args and isinstance(args[0], Tensor):
                self._note_mark(mark, args[0])
            self.differentiates |= torch._C._are_functorch_transforms_active()
            used = [
                (tensor, version_of(tensor))
                for tensor in tensors_in((args, kwargs))
                if not is_functorch_wrapped_tensor(tensor)
            ]
            begun = self._watch.num_keeping
        out = self._run(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            self._note_written(self._recorder.statistics(func, args, kwargs, begun))
            self._note_written([tensor for tensor, version in used if version_of(tensor) != version])
        return out

    def note_reached(self, tensors: Sequence[Tensor]) -> None:
        """A real run has found tensors of the recording."""
        with torch._C.DisableTorchFunction():
            self._note_used(tensors, {})

    def note_changes(self, is_changed: bool) -> None:
        """A real run has put other things into its arguments, or not."""
        if is_changed:
            self.refuse("it puts something into a list, dict or other container that it is given", _RETURN)

    def note_others(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Another thread has run an operation inside."""
        with torch._C.DisableTorchFunction():
            self._note_used(args, kwargs)
            self._note_written(written_by(func, args, kwargs))

    def note_backward(self, inputs: Sequence[Any], accumulates: bool) -> None:
        """Autograd's engine is about to run inside."""
        self.differentiates = True
        if torch._C._are_functorch_transforms_active():
            return  # what it differentiates begins and ends inside
        with torch._C.DisableTorchFunction():
            if accumulates and (not inputs or any(self._state_name(target) for target in inputs)):
                self.failure = TraceError(str(self._recorder.error(_BACKWARD[0], way_out=_BACKWARD[1])))
                raise self.failure
            given = [tensor for tensor in self._given.values() if tensor.requires_grad]
            is_fake = all(isinstance(target, FakeTensor) for target in inputs if isinstance(target, Tensor))
            targets = list(inputs) if is_fake else given  # in a real run, any of them may be meant
            for tensor in given:
                is_target = any(tensor is target for target in targets)
                others = [target for target in targets if target is not tensor]
                if (not is_target or not is_fake) and differentiation.leads_to((tensor,), others):
                    self.refuse("it differentiates what was computed outside of it", differentiation.OWN_MODULE)

    def note_random(self, name: str, seeds: bool) -> None:
        """A function that uses a generator is called."""
        if name.endswith("fork_rng"):
            self.is_forked = True
        elif seeds:
            self.seeds = name

    def finish(self) -> None:
        """Raises for effects of its threads, and for state that the module has not restored; notes what operations have written."""
        self._note_written(self._recorder.meter.written)
        if self.failure is not None:
            raise self.failure
        changed = [tensor for tensor, flag in self._flags if tensor.requires_grad != flag]
        if changed:
            self.refuse(f"it changes whether {self._recorder.known(changed[0])} requires grad", differentiation.OUTSIDE)

    def _note_used(self, *trees: Any) -> None:
        for tensor in tensors_in(trees):
            self._watch.check_untrained(tensor)
            name = "" if id(tensor) in self._given or id(tensor) in self._own else self._recorder.known(tensor)
            if name:
                self.refuse(f"it uses {name}, which is neither among its arguments nor its own", _PASS)
        for value in (*trees[0], *trees[1].values()):
            # One that a module holds keeps what draws from it on one stage.
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                if self._recorder.generators.path(value):
                    continue
                self.generators[f"torch.Generator at {id(value):#x}"] = None

    def _note_written(self, tensors: Sequence[Tensor]) -> None:
        self.writes_attributes |= bool(self._recorder.attributes.written(tensors))
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.written.update(dict.fromkeys(self._in_memory.get(tensor.untyped_storage()._cdata, ())))

    def _note_mark(self, mark: str, tensor: Tensor) -> None:
        fqn = self._state_name(tensor)
        if fqn:
            self._watch.check_state(mark, fqn)
        elif id(tensor) in self._given and mark in ("grad_fn", "is_leaf", "_version"):
            self.refuse("it uses the autograd graph of its arguments", differentiation.WHOLE)
        elif id(tensor) in self._given and mark != "grad":
            self.marked.append(tensor)

    def _state_name(self, target: Any) -> str:
        return self._recorder.state.names.get(id(target), "")


class WholeAttributes:
    """What a module that is called whole does with the memory of its attributes. Made before it runs."""

    def __init__(self, recorder: Recorder, whole: WholeCall, module: nn.Module) -> None:
        self._recorder, self._whole = recorder, whole
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            self._memory = AttributeMemory(module)

    def note_run(self, probe: Callable[[], Probe]) -> None:
        """After a run over fakes: if it has written into attributes, a real run says what autograd keeps of their memory."""
        recorder, meter = self._recorder, self._recorder.meter
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            by_calls = self._whole.writes_attributes or recorder.attributes.written(meter.written)
            writes = by_calls or self._memory.written()
            self._memory.restore()
        if not (writes and torch.is_grad_enabled()):
            return
        recorder.attributes.restore()
        measured = meter.flops, meter.random, meter.written
        try:
            self.note(probe())
        except Exception:  # of the module, on invented values: then all of it may be kept
            extents = self._memory.extents
            recorder.watch.note_attributes([(extents[path], self._name(path)) for path in extents], extents.values())
        meter.flops, meter.random, meter.written = measured

    def note(self, found: Probe) -> None:
        """After a real run."""
        extents = self._memory.extents
        kept = [(extents[path], self._name(path)) for path in found.kept_attributes]
        self._recorder.watch.note_attributes(kept, [extents[path] for path in found.written_attributes])

    def _name(self, path: str) -> str:
        return f"{self._whole.fqn}.{path}" if self._whole.fqn else path
