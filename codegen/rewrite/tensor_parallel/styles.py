"""Explicit tensor-parallel plans: styles by name pattern, as Hugging Face's `tp_plan` has them.

    {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

A pattern names modules (or parameters), a `*` stands for one or more parts of a name's characters without a dot. It may leave out the
beginning of the name. Parameters that no pattern names stay whole. The rest of the layouts follows from these by the search of
`smpc.codegen.rewrite.tensor_parallel.choose_layouts`, so every plan is correct; one that does not fit together costs collectives.

    style            weight of a linear layer                    of an embedding     bias
    colwise          sharded by outputs                          by channels         sharded
    rowwise          sharded by inputs                           by rows             whole
    replicate        whole                                       whole               whole

`colwise_rep`, `colwise_gather_output` are colwise, `rowwise_rep`, `embedding_rowwise`, `rowwise_split_input` rowwise: what their names add
is how outputs and inputs are laid out, which the search decides. `replicated_with_grad_allreduce` and the like are replicate.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn

from smpc.codegen.rewrite.tensor_parallel.choose_layouts import ShardingChoice, choose
from smpc.codegen.rewrite.tensor_parallel.fused_experts import FusedExperts, fused_experts
from smpc.codegen.rewrite.tensor_parallel.layout_problem import Weights
from smpc.codegen.rewrite.tensor_parallel.layouts import PARTIAL, REPLICATED, Layout, LayoutKind
from smpc.codegen.rewrite.tensor_parallel.strategy import Facts, Strategy, short_name
from smpc.config.numbers import shown
from smpc.config.user_files import parse_json, read_text
from smpc.errors import CodegenError, ConfigError
from smpc.tracer.ir import Node, NodeKind, Trace

AUTO, OFF, HUGGING_FACE = "auto", "off", "huggingface"
_COLUMNS, _ROWS, _WHOLE = "colwise", "rowwise", "replicate"

STYLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), _COLUMNS),
        **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"), _ROWS),
        **dict.fromkeys(
            (
                "replicate",
                "replicated",
                "replicated_with_grad_allreduce",
                "sequence_parallel",
                "all_reduce",
                "activation",
            ),
            _WHOLE,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class StylePlan:
    """`styles`: (pattern, style) pairs; None: choose freely. `layouts` of parameters that are decided already; None: none are.

    `whole`: names of modules whose parameters every rank has whole, whatever else is said. `experts`: how ranks can have slices of those
    that are called whole. `by_expert`: of modules whose experts ranks can have some of, the names, and the attributes that count experts.
    `segmented`: the same of modules of products on rows that are grouped by expert.
    """

    styles: tuple[tuple[str, str], ...] | None = None
    layouts: tuple[tuple[str, Layout], ...] | None = None
    whole: tuple[str, ...] = ()
    experts: FusedExperts = field(default_factory=FusedExperts)
    by_expert: tuple[tuple[str, tuple[str, ...]], ...] = ()
    segmented: tuple[tuple[str, tuple[str, ...]], ...] = ()


def find_plan(model: nn.Module, plan: str | Mapping[str, str]) -> StylePlan:
    """The plan of that name, or of these styles. ConfigError if it is wrong: unknown styles, patterns that fit nothing."""
    if plan == AUTO:
        return StylePlan(experts=fused_experts(model))
    if plan == OFF:
        return StylePlan(())
    styles = _of_model(model) if plan == HUGGING_FACE else plan
    if not isinstance(styles, Mapping):
        raise ConfigError(
            f"tensor_parallel_plan: expected {AUTO!r}, {OFF!r}, {HUGGING_FACE!r} or styles by name pattern, found {plan!r}"
        )
    names = [
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
        *(n for n, _ in model.named_modules()),
    ]
    wrong = [
        f"{pattern!r}: expected a style of {', '.join(STYLES)}, found {style!r}"
        for pattern, style in styles.items()
        if (not isinstance(style, str) or style not in STYLES) and plan != HUGGING_FACE
    ]
    if plan != HUGGING_FACE:  # a model's own plan is for all models of its kind, tied or not
        wrong += [
            f"{pattern!r}: expected the name of a module or parameter, found none that fits; the model has {_some(names)}"
            for pattern in styles
            if not any(_fits(pattern, name) for name in names)
        ]
    if wrong:
        raise ConfigError("tensor_parallel_plan: " + "; ".join(wrong))
    unknown = [f"{pattern} ({style})" for pattern, style in styles.items() if style not in STYLES]
    if unknown:
        warnings.warn(
            f"tensor_parallel_plan: these stay whole, as their styles are not known: {', '.join(unknown)}", stacklevel=3
        )
    return StylePlan(tuple((pattern, style) for pattern, style in styles.items() if style in STYLES))


def _some(names: list[str]) -> str:
    """The first names that say something, for messages."""
    own = [name for name in names if name][:4]
    return f"{', '.join(own)}, ..." if own else "none"


def read_styles(plan: str | Mapping[str, str], what: str) -> str | Mapping[str, str]:
    """A plan's name and styles as they are; of a .json file, the styles in it. ConfigError if it cannot be read, or has something else."""
    if not isinstance(plan, str) or not plan.endswith(".json"):
        return plan
    what = f"{what} {shown(plan)}"
    styles = parse_json(read_text(plan, what), what)
    if not all(isinstance(style, str) for style in styles.values()):
        raise ConfigError(f'{what}: expected {{"name pattern": "style", ...}}, found {shown(styles)}')
    return styles


def choose_by_plan(
    trace: Trace, degree: int, plan: StylePlan, weights: Weights | None = None, facts: Facts | None = None
) -> ShardingChoice:
    """The best choice among those that the plan allows. ConfigError if sizes that it splits cannot be."""
    if plan.styles is None and plan.layouts is None:
        stays = _Whole(trace, plan)
        choice = choose(trace, degree, stays.allows, weights, facts=facts)
        by_node = all(stays.allows(trace.node(name), strategy) for name, strategy in choice.by_node)
        if by_node and all(stays.fits(name, layout) for name, layout in choice.by_parameter):
            return choice
        return choose(
            trace, degree, stays.allows, weights, share_blocks=False, facts=facts
        )  # blocks alike but for that
    restriction = _Restriction(trace, plan)
    restriction.check_sizes(trace, degree)
    try:
        return choose(trace, degree, restriction.allows, weights, share_blocks=False, facts=facts)
    except CodegenError as error:
        if plan.layouts is None:
            raise
        raise CodegenError(
            f"{error}. The program of the first step has decided which slices of parameters ranks have, and another one is needed now that "
            "cannot compute with these: let the first step be one of this kind (train() or eval(), the same inputs), or leave parameters "
            "whole by the plan that both can use"
        ) from None


class _Whole:
    """Lets parameters of some modules be whole alone, and of experts that are called whole such slices alone as add up."""

    def __init__(self, trace: Trace, plan: StylePlan) -> None:
        names = [name for state in trace.state for name in state.names]
        self._names = frozenset(name for name in names if name.startswith(tuple(f"{module}." for module in plan.whole)))
        self._experts, self._by_expert, self._segmented = plan.experts, dict(plan.by_expert), dict(plan.segmented)

    def allows(self, node: Node, strategy: Strategy) -> bool:
        """Whether none of them is divided."""
        if node.kind is NodeKind.GET_ATTR:
            return self.fits(node.target, strategy.output)
        divided = {name: layout for name, layout in strategy.state if layout.kind is LayoutKind.SHARDED}
        if not divided:
            return True
        if strategy.experts:
            known = self._by_expert if strategy.output == PARTIAL else self._segmented
            return all(known.get(f"{node.target}.{name}".rstrip(".")) == counts for name, counts in strategy.experts)
        alternates = all(layout.is_plain for layout in divided.values())
        return (
            not any(name in self._names for name in divided)
            and node.target not in (*self._experts.undivided, *self._by_expert)
            and alternates == (node.target in self._experts.alternating)
        )

    def fits(self, name: str, layout: Layout) -> bool:
        """Whether a parameter may have this layout."""
        return name not in self._names or layout.kind is not LayoutKind.SHARDED


class _Restriction(_Whole):
    """Which strategies a plan allows."""

    def __init__(self, trace: Trace, plan: StylePlan) -> None:
        super().__init__(trace, plan)
        self._users: dict[str, list[Node]] = {}
        for node in trace.nodes:
            for name in node.inputs:
                self._users.setdefault(name, []).append(node)
        self._aliases = {name: state.names for state in trace.state if state.is_parameter for name in state.names}
        self._plan = plan
        self._fixed = None if plan.layouts is None else dict(plan.layouts)

    def allows(self, node: Node, strategy: Strategy) -> bool:
        """Parameters must have the plan's layouts; a module called whole has its parameters to itself."""
        if not super().allows(node, strategy):
            return False
        if node.kind is NodeKind.GET_ATTR:
            return self._allows(node.target, strategy.output, node)
        if node.kind is NodeKind.CALL_MODULE:
            split = {name: layout for name, layout in strategy.state if layout.kind is LayoutKind.SHARDED}
            own = [name for name in self._aliases if name.startswith(f"{node.target}.") and name not in self._names]
            return all(self._allows(name, split.get(name, REPLICATED), None) for name in own)
        return True

    def check_sizes(self, trace: Trace, degree: int) -> None:
        """Raises ConfigError, listing the parameters that the plan's styles split and the ranks do not divide."""
        wrong = []
        for node in trace.nodes if self._fixed is None else ():
            style = (
                self._style(node.target) if node.kind is NodeKind.GET_ATTR and node.target in self._aliases else _WHOLE
            )
            if style == _WHOLE or node.spec is None or (style == _ROWS and not node.target.endswith("weight")):
                continue
            shape, columns = node.spec.shape, [_column_dim(user, node) for user in self._users.get(node.name, ())]
            dims = [dim if style == _COLUMNS or len(shape) < 2 else 1 - dim for dim in dict.fromkeys(columns)]
            wrong += [
                f"{node.target}, {style}: expected dimension {dim} divisible by {degree} ranks, found {shape[dim]}"
                for dim in dims
                if shape[dim] % degree
            ]
        if wrong:
            raise ConfigError(
                "tensor_parallel_plan: " + "; ".join(dict.fromkeys(wrong)) + "; leave them out of the plan"
            )

    def _allows(self, name: str, layout: Layout, node: Node | None) -> bool:
        if self._fixed is not None:
            wanted = next((self._fixed[alias] for alias in self._aliases[name] if alias in self._fixed), REPLICATED)
            return layout == wanted
        style = self._style(name)
        if style == _WHOLE or node is None or (style == _ROWS and not name.endswith("weight")):
            return layout.kind is LayoutKind.REPLICATED
        if layout.kind is not LayoutKind.SHARDED:
            return False
        columns = [_column_dim(user, node) for user in self._users.get(node.name, ())]
        return all((layout.dim == dim) == (style == _COLUMNS) for dim in columns)

    def _style(self, name: str) -> str:
        for alias in self._aliases[name] if name not in self._names else ():
            for pattern, style in self._plan.styles or ():
                if _fits(pattern, alias) or _fits(pattern, alias.rpartition(".")[0]):
                    return STYLES[style]
        return _WHOLE


def _column_dim(user: Node, parameter: Node) -> int:
    """The dimension of a parameter that is the operation's outputs."""
    assert parameter.spec is not None
    if len(parameter.spec.shape) < 2:
        return 0
    return 1 if short_name(user.target) in ("addmm", "matmul", "__matmul__", "embedding") else 0


def _fits(pattern: str, name: str) -> bool:
    inner = "".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern))
    return re.fullmatch(rf"(.*\.)?{inner}", name) is not None


def _of_model(model: nn.Module) -> Mapping[str, str]:
    """What a Hugging Face model says about itself: `tp_plan`, or its configuration's plan for the base model."""
    found = getattr(model, "tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not found:
        raise ConfigError(
            f"tensor_parallel_plan: {HUGGING_FACE!r} needs a model with a tp_plan, {type(model).__name__} has none; use {AUTO!r}"
        )
    return dict(found)
