"""The source of a stage: the modules that it calls whole, and the rest node by node.

A stage calls the LARGEST INTACT modules and computes the rest node by node. A module call is intact in a stage when
    - all its nodes that matter are run by the stage, which also holds what its dead nodes read,
    - every tensor used inside comes from its arguments, or is a parameter, buffer or attribute that the module reads itself,
    - every tensor used outside is among those it returns,
    - its arguments can be written down, and the tensors among them are at hand,
    - the checkpointed regions inside are those that its own Python asks for, and they use no buffers that change.

Any other checkpointed region becomes a function of its own, which `StageModule.checkpoint` runs and runs again. A stage's part of a
module in `units` also becomes a function: `self.inside("h.0", function, ...)` calls the module, whatever is wrapped around it, to run
the function.

Nodes that neither reach the model's output nor have an effect are dead and not emitted.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from smpc.codegen.printer import (
    AUTOCAST_SCOPE,
    attribute_source,
    call_source,
    context_source,
    in_text,
    is_addressable,
    is_plain,
    is_statement,
    node_source,
)
from smpc.codegen.program import StageCode
from smpc.errors import CodegenError
from smpc.partitioner.graph.plan import Plan
from smpc.partitioner.graph.recompute_regions import changing_buffers
from smpc.tracer.constants import Ref, is_writable, references
from smpc.tracer.ir import ModuleCall, Node, NodeKind, Region, Trace
from smpc.tracer.structure import is_index, split_item

_IN_SCOPE = ("F", "StageModule", "function", "importlib", "self", "tensor_ops", "torch")
_COMPUTES = (NodeKind.CALL_FUNCTION, NodeKind.CALL_MODULE, NodeKind.SET_ATTR)


class TraceFacts:
    """The facts about the trace that all stages need."""

    def __init__(self, trace: Trace, plan: Plan, units: Collection[str] = ()) -> None:
        self.trace, self.plan = trace, plan
        self.units = frozenset(units)
        self.positions: dict[int, list[int]] = {}  # by stage, of the nodes that the plan assigns to it
        assignment = dict(plan.assignment)
        for position, node in enumerate(trace.nodes):
            if node.name in assignment:
                self.positions.setdefault(assignment[node.name], []).append(position)
        self.live = trace.live
        self.users: dict[str, list[int]] = {}  # node -> positions of live nodes that read it
        for position, node in enumerate(trace.nodes):
            if node.name in self.live:
                for name in node.inputs:
                    self.users.setdefault(name, []).append(position)
        self.outputs = frozenset(trace.output_names)
        self.rebound = frozenset(node.target for node in trace.nodes if node.kind is NodeKind.SET_ATTR)
        self.children: dict[int, list[int]] = {}
        for index, call in enumerate(trace.calls):
            self.children.setdefault(call.parent, []).append(index)
        self._taken = dict.fromkeys((*_IN_SCOPE, *keyword.kwlist, *dir(builtins)))
        self.variables = self._name_nodes()

    def computes(self, node: Node) -> bool:
        """Whether a node is work (inputs and attribute reads are not)."""
        return node.kind in _COMPUTES

    def new_variable(self, base: str) -> str:
        """A variable called `base`, or like it where that is taken or no name."""
        base = unicodedata.normalize("NFKC", base)  # as Python reads it
        name, count = base, 0
        while name in self._taken or not name.isidentifier():
            count += 1
            name = f"{base}_{count}" if base.isidentifier() else f"v_{count}"
        self._taken[name] = None
        return name

    def _name_nodes(self) -> dict[str, str]:
        """A readable variable for every node: what a module returns is called after the module."""
        wanted: dict[str, str] = {}
        for call in self.trace.calls[1:]:
            names = references(call.output_leaves)
            if len(names) == 1 and names[0] not in wanted and self.computes(self.trace.node(names[0])):
                *_, before, last = ("", *call.fqn.split("."))
                wanted[names[0]] = f"{before}_{last}" if last.isdigit() else last
        return {node.name: self.new_variable(wanted.get(node.name, node.name)) for node in self.trace.nodes}


@dataclass(slots=True)
class _Statement:
    """One line of a stage: `text` needs the variables in `reads` and defines those in `defines`.

    A region's line calls the function of the name `function`, whose statements are `body`; it takes `reads` and returns `defines`.
    `scopes`: of autocast, of what the line runs.
    """

    text: str
    reads: tuple[str, ...]
    defines: tuple[str, ...]
    context: str = ""
    function: str = ""
    body: tuple[_Statement, ...] = ()
    scopes: tuple[int, ...] = ()


@dataclass(slots=True)
class StageWriter:
    """Writes the code of one stage."""

    program: TraceFacts
    index: int
    statements: list[_Statement] = field(default_factory=list)
    modules: dict[str, None] = field(default_factory=dict)
    attributes: dict[str, None] = field(default_factory=dict)
    nodes: dict[str, None] = field(default_factory=dict)  # what the stage runs
    positions: list[int] = field(default_factory=list)  # in the trace
    available: dict[str, None] = field(default_factory=dict)  # values at hand so far
    first_reads: dict[str, None] = field(default_factory=dict)  # reads of buffers that are rebound later
    foreign: frozenset[str] = frozenset()  # parameters and buffers of other stages
    regions: tuple[Region, ...] = ()  # what is computed again, outer ones first
    by_name: tuple[
        str, ...
    ] = ()  # attributes to read inside of modules that are called whole: these are the user's own

    def write(self) -> StageCode:
        """The stage's code."""
        trace, plan = self.program.trace, self.program.plan
        stage = plan.stages[self.index]
        inputs = tuple(dict.fromkeys(v for edge in plan.edges if edge.destination == self.index for v in edge.values))
        outputs = tuple(dict.fromkeys(v for edge in plan.edges if edge.source == self.index for v in edge.values))
        if self.index == len(plan.stages) - 1:
            assert not outputs, "the last stage sends to no stage"
            outputs = trace.output_names
        held = frozenset((*stage.parameters, *stage.buffers))
        self.foreign = frozenset(state.name for state in trace.state) - held
        self._select_nodes(stage.recomputed)
        self.available = dict.fromkeys(inputs)
        self.regions = tuple(region for region in stage.checkpoints if not self._is_of_a_unit(region))
        self._write_call(0)
        source = self._class_source(inputs, outputs)
        inside = tuple(name for name in self.attributes if self._has_index_inside(name))
        if inside and not self.by_name:
            return StageWriter(self.program, self.index, by_name=inside).write()
        for name in (*stage.parameters, *stage.buffers):
            self.attributes[name] = None
        return StageCode(
            self.index, f"Stage{self.index}", inputs, outputs, source, tuple(self.modules), tuple(self.attributes)
        )

    def _select_nodes(self, recomputed: tuple[str, ...]) -> None:
        program, trace = self.program, self.program.trace
        for position in sorted({*program.positions.get(self.index, ()), *map(trace.position, recomputed)}):
            node = trace.nodes[position]
            if program.computes(node) and node.name in program.live:
                self.nodes[node.name] = None
                self.positions.append(position)

    def _runs_within(self, call: ModuleCall) -> bool:
        """Whether the stage runs something of a call."""
        found = bisect_left(self.positions, call.first)
        return found < len(self.positions) and self.positions[found] < call.last

    # -- walking the module calls --------------------------------------------------------------------------------------

    def _write_call(self, index: int) -> None:
        """Writes what this stage runs of a call, from the inside: children that are intact whole, the rest node by node."""
        call = self.program.trace.calls[index]
        regions = [region for region in self.regions if region.call == index]
        self._write_span(call.first, call.last, list(self.program.children.get(index, ())), regions)

    def _write_span(self, first: int, last: int, children: list[int], regions: list[Region]) -> None:
        """Writes some nodes of a call; `children` and `regions` are those in this span that no other call is around."""
        calls, position = self.program.trace.calls, first
        while children or regions:
            if regions and (not children or regions[0].first <= calls[children[0]].first):
                region = regions[0]
                self._write_nodes(position, region.first)
                count = sum(calls[child].last <= region.last for child in children)
                inner = [other for other in regions[1:] if other.last <= region.last]
                self._write_region(region, children[:count], inner)
                children, regions, position = children[count:], regions[1 + len(inner) :], region.last
                continue
            index = children.pop(0)
            call = calls[index]
            self._write_nodes(position, call.first)
            if self._runs_within(call):
                if self._is_intact(index):
                    self._emit_call(call)
                elif call.fqn in self.program.units:
                    self._write_unit(index)
                else:
                    self._write_call(index)
            position = call.last
        self._write_nodes(position, last)

    def _write_region(self, region: Region, children: list[int], inner: list[Region]) -> None:
        """Writes a region as a function and the statement that runs it."""
        trace = self.program.trace
        base = f"checkpointed_{region.name.rpartition(' to ')[2].replace('.', '_') or 'region'}"
        nodes = trace.nodes[region.first : region.last]
        draws = any(node.random or node.kind is NodeKind.CALL_MODULE for node in nodes)
        options = [] if region.preserve_rng_state and draws else ["preserve_rng_state=False"]
        buffers = changing_buffers(trace, region)
        options += [f"buffers={buffers!r}"] if buffers else []
        self._write_function(
            base,
            (region.first, region.last),
            lambda: self._write_span(region.first, region.last, children, inner),
            lambda name, reads: f"self.checkpoint({', '.join((name, *reads, *options))})",
        )

    def _write_unit(self, index: int) -> None:
        """Writes what this stage runs of a call as a function, and the statement that has the module run it."""
        call = self.program.trace.calls[index]
        self._write_function(
            f"inside_{call.fqn.replace('.', '_')}",
            (call.first, call.last),
            lambda: self._write_call(index),
            lambda name, reads: f"self.inside({', '.join((repr(call.fqn), name, *reads))})",
        )

    def _write_function(
        self,
        base: str,
        span: tuple[int, int],
        write: Callable[[], None],
        call_of: Callable[[str, tuple[str, ...]], str],
    ) -> None:
        """Has `write` write a span as a function with a name like `base`, and writes the statement `call_of` (its name, what it reads)."""
        program, before, statements = self.program, dict(self.available), self.statements
        self.statements = []
        write()
        body, self.statements = tuple(self.statements), statements
        made = [name for name in self.available if name not in before]
        self.available = before
        defined = dict.fromkeys(variable for statement in body for variable in statement.defines)
        reads = tuple(dict.fromkeys(v for statement in body for v in statement.reads if v not in defined))
        results = [name for name in made if self._is_used_outside(name, *span)]
        self.available.update(dict.fromkeys(results))
        function = program.new_variable(base)
        defines = tuple(program.variables[name] for name in results)
        call = call_of(function, reads)
        text = f"{', '.join(defines)} = {call}" if defines else call
        scopes = tuple(dict.fromkeys(scope for statement in body for scope in statement.scopes))
        self.statements.append(_Statement(text, reads, defines, function=function, body=body, scopes=scopes))

    def _is_of_a_unit(self, region: Region) -> bool:
        """Whether a region is made by calling a unit, whose class checkpoints by itself."""
        if not region.own:
            return False
        inside = (self.program.trace.calls[index] for index in self.program.children.get(region.call, ()))
        return any(
            call.bare and call.fqn in self.program.units and region.first <= call.first and call.last <= region.last
            for call in inside
        )

    def _write_nodes(self, first: int, last: int) -> None:
        for node in self.program.trace.nodes[first:last]:
            if node.name in self.nodes:
                self._emit_node(node)

    def _does_its_checkpoints(self, index: int) -> bool:
        """Whether the regions inside a call are made by calling it: all that were recorded, and no others."""
        trace = self.program.trace
        call = trace.calls[index]

        def inside(region: Region) -> bool:
            around = call.first <= region.first and region.last <= call.last
            return around and not self._is_around(region.call, index)

        active = [region for region in self.regions if inside(region)]
        same = set(active) == {region for region in trace.regions if inside(region)}
        return same and all(region.own and not changing_buffers(trace, region) for region in active)

    def _is_around(self, outer: int, inner: int) -> bool:
        """Whether a call is around another one."""
        calls = self.program.trace.calls
        index = calls[inner].parent
        while index >= 0 and index != outer:
            index = calls[index].parent
        return index == outer

    def _is_intact(self, index: int) -> bool:
        trace, program = self.program.trace, self.program
        call = trace.calls[index]
        if not (call.whole and call.fqn and is_plain(call.arguments)) or not all(
            map(is_writable, call.argument_leaves)
        ):
            return False
        arguments = references(call.argument_leaves)
        if not all(self._at_hand(name) for name in arguments):
            return False
        returned = dict.fromkeys(references(call.output_leaves))
        span = range(call.first, call.last)
        for node in trace.nodes[call.first : call.last]:
            if not program.computes(node):
                continue
            if node.name in program.live and node.name not in self.nodes:
                return False
            reads = (trace.node(name) for name in node.inputs)
            if any(read.kind is NodeKind.GET_ATTR and read.target in self.foreign for read in reads):
                return False  # Python computes it, though nothing comes of it
            for name in node.inputs:
                outside = trace.position(name) not in span and trace.node(name).kind is not NodeKind.GET_ATTR
                if outside and name not in arguments:
                    return False
            if self._is_used_outside(node.name, call.first, call.last) and node.name not in returned:
                return False
        return is_addressable(call.output) and self._does_its_checkpoints(index)

    def _at_hand(self, name: str) -> bool:
        return name in self.available or self.program.trace.node(name).kind is NodeKind.GET_ATTR

    # -- statements ----------------------------------------------------------------------------------------------------

    def _name(self, node: str) -> str:
        """The expression for a node's value."""
        found = self.program.trace.node(node)
        if found.kind is NodeKind.GET_ATTR:
            self.attributes[found.target] = None
            if found.target not in self.program.rebound:
                return self._attribute_source(found.target)
            self.first_reads[node] = None
        return self.program.variables[node]

    def _emit_node(self, node: Node) -> None:
        if not is_writable((node.args, dict(node.kwargs))):
            raise CodegenError(
                f"{node.target} at {node.source or 'an unknown line'} has a class as argument that a program cannot name: one that is "
                "defined inside of a function; define it in a module"
            )
        text = node_source(node, self._name)
        if node.kind is NodeKind.CALL_MODULE:
            self.modules[node.target] = None
        if node.kind is NodeKind.SET_ATTR:
            self.attributes[node.target] = None
        statement = is_statement(node)
        self.statements.append(
            _Statement(
                text if statement else f"{self.program.variables[node.name]} = {text}",
                self._variables(node.inputs),
                () if statement else (self.program.variables[node.name],),
                context_source(node.grad_enabled, node.autocast),
                scopes=_scopes_of([node]),
            )
        )
        self.available[node.name] = None

    def _emit_call(self, call: ModuleCall) -> None:
        self.modules[call.fqn] = None
        text = call_source(call.fqn, call.arguments, call.argument_leaves, self._name, bare=call.bare)
        reads = self._variables(references(call.argument_leaves))
        context = context_source(call.grad_enabled, call.autocast)
        scopes = _scopes_of([call, *self.program.trace.nodes[call.first : call.last]])
        found: dict[str, str] = {}  # node -> path in the output
        for leaf, path in zip(call.output_leaves, call.output.paths(), strict=True):
            if isinstance(leaf, Ref) and leaf.name not in self.available:
                found.setdefault(leaf.name, path)
        found = {name: path for name, path in found.items() if self._is_used_outside(name, call.first, call.last)}
        variables = self.program.variables
        if len(found) == 1:
            (name, path) = next(iter(found.items()))
            defines = (variables[name],)
            self.statements.append(_Statement(f"{defines[0]} = {text}{path}", reads, defines, context, scopes=scopes))
        elif not found:
            self.statements.append(_Statement(text, reads, (), context, scopes=scopes))
        else:
            whole = self.program.new_variable(f"{call.fqn.replace('.', '_')}_output")
            self.statements.append(_Statement(f"{whole} = {text}", reads, (whole,), context, scopes=scopes))
            for name, path in found.items():
                part = _Statement(f"{variables[name]} = {whole}{path}", (whole,), (variables[name],))
                part.context, part.scopes = (context, scopes) if scopes else ("", ())
                self.statements.append(part)
        self.available.update(dict.fromkeys(found))

    def _is_used_outside(self, name: str, first: int, last: int) -> bool:
        """Whether a node outside of this span reads the value, or the model returns it."""
        users = self.program.users.get(name, ())
        return name in self.program.outputs or any(not first <= position < last for position in users)

    def _has_index_inside(self, path: str) -> bool:
        """Whether an attribute is reached by a number inside of a module that the stage calls whole."""
        inside = (path.removeprefix(f"{name}.") for name in self.modules if path.startswith(f"{name}."))
        return any(is_index(part) for rest in inside for part in split_item(rest)[0].split("."))

    def _attribute_source(self, path: str) -> str:
        return attribute_source(path, by_name=path in self.by_name)

    def _variables(self, names: tuple[str, ...]) -> tuple[str, ...]:
        kinds = ((name, self.program.trace.node(name).kind) for name in names)
        return tuple(
            self.program.variables[name]
            for name, kind in kinds
            if kind is not NodeKind.GET_ATTR or name in self.first_reads
        )

    # -- source --------------------------------------------------------------------------------------------------------

    def _attributes_source(self) -> list[str]:
        found = [name for name in self.program.trace.differentiating if name in self.nodes]
        return ["", "    differentiates = True  # autograd runs in its forward"] if found else []

    def _class_source(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str:
        variables = self.program.variables
        results = [self._name(name) for name in outputs]
        reads = [(variables[name], self.program.trace.node(name).target) for name in self.first_reads]
        self.statements[:0] = [
            _Statement(f"{variable} = {self._attribute_source(target)}", (), (variable,)) for variable, target in reads
        ]
        parameters = ", ".join(("self", *(variables[name] for name in inputs)))
        lines = [
            f"class Stage{self.index}(StageModule):",
            f'    """Stage {self.index} of {len(self.program.plan.stages)} of {in_text(self.program.trace.model_class)}."""',
            *self._attributes_source(),
            "",
            f"    def forward({parameters}):",
            *_function_body(self.statements, [variables[name] for name in inputs], results, " " * 8),
            f"        return ({', '.join(results)}{',' if len(results) == 1 else ''})",
        ]
        return "\n".join(lines) + "\n"


def _function_body(
    statements: Sequence[_Statement], inputs: Sequence[str], results: Sequence[str], indent: str
) -> Iterator[str]:
    """The statements, each under its context, with every variable deleted after its last use."""
    last_use = dict.fromkeys(inputs, -1)
    for position, statement in enumerate(statements):
        last_use.update(dict.fromkeys((*statement.reads, *statement.defines), position))
    kept = dict.fromkeys(results)
    context: tuple[str, tuple[int, ...]] = "", ()
    first, last = _autocast_spans(statements)
    for position, statement in enumerate(statements):
        if position in first:
            yield f"{indent}with {AUTOCAST_SCOPE}:"
            indent, context = indent + " " * 4, ("", ())
        if statement.context and (statement.context, statement.scopes) != context:
            yield f"{indent}with {statement.context}:"
        context = statement.context, statement.scopes
        inner = indent + " " * (4 if statement.context else 0)
        if statement.function:
            yield f"{inner}def {statement.function}({', '.join(statement.reads)}):"
            yield from _function_body(statement.body, statement.reads, statement.defines, inner + " " * 4)
            if statement.defines or not statement.body:
                yield f"{inner}    return {', '.join(statement.defines)}"
        yield inner + statement.text
        names = dict.fromkeys((*statement.reads, *statement.defines))
        dead = [name for name in names if last_use[name] == position and name not in kept]
        if dead:
            yield f"{inner}del {', '.join(dead)}"
        if position in last:
            indent, context = indent[:-4], ("", ())


def _scopes_of(recorded: Iterable[Node | ModuleCall]) -> tuple[int, ...]:
    """The scopes of autocast of nodes and calls, in their order."""
    return tuple(dict.fromkeys(each.autocast.scope for each in recorded if each.autocast and each.autocast.scope))


def _autocast_spans(statements: Sequence[_Statement]) -> tuple[frozenset[int], frozenset[int]]:
    """The first and the last statements of scopes of autocast that one context does not hold together."""
    spans: dict[int, list[int]] = {}
    for position, statement in enumerate(statements):
        for scope in statement.scopes:
            spans.setdefault(scope, []).append(position)
    found: list[tuple[int, int]] = []
    for positions in spans.values():
        first, last = positions[0], positions[-1]
        contexts = {(statement.context, statement.scopes) for statement in statements[first : last + 1]}
        if first != last and not (len(contexts) == 1 and statements[first].context):
            found.append((first, last))
    if any(after <= last for (_, last), (after, _) in itertools.pairwise(sorted(found))):
        raise CodegenError(
            "expected every autocast of the model to end in the module, or in the checkpointed region, that it begins in, found one "
            "that goes on; enter it with `with` in one forward, or have the module called whole (smpc.mark_leaf)"
        )
    return frozenset(first for first, _ in found), frozenset(last for _, last in found)
