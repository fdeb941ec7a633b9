"""Random calls of every operation that sharding rules know, alone or as graphs in which each takes what others have made.

A case draws a call: `case(draw)` gives a function and the values that it takes. `RULED` has the cases of each rule, by the short name or
the target that the rule is found by.
"""

from __future__ import annotations

from types import BuiltinFunctionType

import torch
import torch.nn.functional as F
from image_cases import IMAGES
from torch import nn

from smpc.tracer.targets import GETATTR, GETITEM

SIZES = (4, 8, 12)
ODD_SIZES = (1, 3, 6)
LARGEST = 4096  # elements of a value


class Draw:
    """Draws values and calls: leaves are parameters and inputs of a model, everything else is made of them."""

    def __init__(self, rng, reuse=0.0):
        self.rng, self.reuse = rng, reuse
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.values, self.leaves, self.calls = [], {}, []  # leaves: index of the value -> whether it is a parameter
        self.used = set()

    def pick(self, options):
        return options[self.rng.randrange(len(options))]

    def size(self):
        return self.pick(SIZES if self.rng.random() < 0.85 else ODD_SIZES)

    def shape(self, low, high):
        return tuple(self.size() for _ in range(self.rng.randint(low, high)))

    def leaf(self, value, is_parameter):
        self.values.append(value)
        self.leaves[len(self.values) - 1] = is_parameter
        return len(self.values) - 1

    def tensor(self, *shape):
        """A floating-point value of this shape."""
        known = [i for i, v in enumerate(self.values) if tuple(v.shape) == shape and v.is_floating_point()]
        if known and self.rng.random() < self.reuse:
            return self.pick(known)
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return self.leaf(value, self.rng.random() < 0.85)

    def any(self, low=1, high=4):
        """A floating-point value of a rank between `low` and `high`."""
        known = [i for i, v in enumerate(self.values) if low <= v.dim() <= high and v.is_floating_point()]
        recent = known[-8:]
        if recent and self.rng.random() < self.reuse:
            return self.pick(recent)
        return self.tensor(*self.shape(low, high))

    def of(self, index):
        """The shape of a value."""
        return tuple(self.values[index].shape)

    def broadcast(self, index):
        """Another value that is broadcast to the shape of this one."""
        shape = self.of(index)
        first = self.rng.randint(0, len(shape)) if shape else 0
        return self.tensor(*(1 if self.rng.random() < 0.25 else size for size in shape[first:]))

    def integers(self, *shape, below):
        return self.leaf(torch.randint(0, below, shape, generator=self.generator), False)

    def booleans(self, *shape):
        return self.leaf(torch.rand(shape, generator=self.generator) < 0.5, False)

    def dim(self, index):
        rank = len(self.of(index))
        return self.rng.randrange(rank) - self.pick((0, rank))

    def add(self, case):
        """Draws a call and makes it; whether its results are numbers that others can take."""
        function, inputs = case(self)
        found = function(*(self.values[i] for i in inputs))
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if not all(_is_usable(result) for result in results):
            return False
        self.calls.append((function, tuple(inputs), len(results)))
        self.used.update(inputs)
        self.values += [result.detach() for result in results]
        return True

    def model(self):
        return Graph(self)


def _is_usable(value):
    if not isinstance(value, torch.Tensor) or value.numel() > LARGEST or value.numel() == 0:
        return False
    if not value.is_floating_point():
        return True
    return value.dtype == torch.float64 and bool(value.isfinite().all() and value.abs().max() < 1e3)


class Graph(nn.Module):
    """The calls that were drawn, in their order, and a loss of all that no call takes."""

    def __init__(self, draw):
        super().__init__()
        self.leaves, self.calls, self.count = dict(draw.leaves), list(draw.calls), len(draw.values)
        self.ends = [i for i in range(self.count) if i not in draw.used and i not in self.leaves]
        for index, is_parameter in self.leaves.items():
            value = draw.values[index]
            if is_parameter and value.is_floating_point():
                self.register_parameter(f"leaf{index}", nn.Parameter(value.clone()))
            else:
                self.register_buffer(f"leaf{index}", value.clone())

    def forward(self):
        values = dict.fromkeys(range(self.count))
        values.update({index: getattr(self, f"leaf{index}") for index in self.leaves})
        free = [index for index in values if index not in self.leaves]
        made = iter(free)
        for function, inputs, _ in self.calls:
            found = function(*(values[i] for i in inputs))
            for result in found if isinstance(found, (tuple, list)) else (found,):
                values[next(made)] = result
        ends = [values[i] for i in self.ends]
        return sum(torch.tanh(end.double()).square().sum() for end in ends)


# -- pointwise -----------------------------------------------------------------------------------------------------------


def unary(function, prepare=lambda x: x):
    def case(draw):
        return lambda x: function(prepare(x)), [draw.any(0)]

    return case


def binary(function):
    """Of two values, broadcast either way, or of one and a number, or of one twice."""

    def case(draw):
        x = draw.any(1)
        form = draw.rng.randrange(7)
        if form == 0:
            return lambda a: function(a, 1.5), [x]
        if form == 6 and isinstance(function, BuiltinFunctionType):
            return lambda a: function(a, other=1.5), [x]
        if form == 1:
            return lambda a: function(a, a), [x]
        y = draw.broadcast(x)
        return (lambda a, b: function(a, b)), ([x, y] if form > 3 else [y, x])

    return case


def comparison(function):
    def case(draw):
        x = draw.any(1)
        return (lambda a, b: function(a, b).double() * a), [x, draw.broadcast(x)]

    return case


def logical(function, operands):
    def case(draw):
        x = draw.any(1)
        if operands == 1:
            return lambda a: function(a > 0).double() * a, [x]
        return (lambda a, b: function(a > 0, b > 0).double() * a), [x, draw.broadcast(x)]

    return case


def _positive(x):
    return x.abs() + 0.5


def _clamped(draw):
    x = draw.any(1)
    return (lambda a, b: torch.clamp(a, min=b)), [x, draw.broadcast(x)]


def _where(draw):
    x = draw.any(1)
    shape = draw.of(x)
    return torch.where, [draw.booleans(*shape[draw.rng.randint(0, len(shape)) :]), x, draw.broadcast(x)]


def _masked_fill(draw):
    x = draw.any(1)
    shape = draw.of(x)
    return (lambda a, mask: a.masked_fill(mask, -2.0)), [x, draw.booleans(*shape[draw.rng.randint(0, len(shape)) :])]


def _three(function):
    def case(draw):
        x = draw.any(1)
        return function, [x, draw.broadcast(x), draw.broadcast(x)]

    return case


def _to(draw):
    kind = draw.pick((torch.float32, torch.bool, torch.int64, torch.float64))
    return lambda x: (x * 2).to(kind).double() * 0.5, [draw.any(1)]


def _division(draw):
    mode = draw.pick((None, "floor", "trunc"))
    x = draw.any(1)
    if draw.rng.random() < 0.5:
        return lambda a: torch.div(a, 0.7, rounding_mode=mode), [x]
    return (lambda a, b: torch.div(a, b.abs() + 0.5, rounding_mode=mode)), [x, draw.broadcast(x)]


def _dropout(draw):
    """Of all elements: what it draws differs between the ranks."""
    x = draw.any(1)
    return (lambda a, b: F.dropout(a, 1.0) + b), [x, draw.broadcast(x)]


def _scaled_add(draw):
    x = draw.any(1)
    return (lambda a, b: torch.add(a, b, alpha=0.5)), [x, draw.broadcast(x)]


# -- what moves elements -------------------------------------------------------------------------------------------------


def _split_of(total, draw):
    """The total as a product of two or three numbers, or as one."""
    found = [(a, total // a) for a in range(1, total + 1) if total % a == 0]
    return draw.pick(found)


def _reshape(name):
    def case(draw):
        x = draw.any(1, 4)
        shape = list(draw.of(x))
        if len(shape) < 4 and draw.rng.random() < 0.5:
            place = draw.rng.randrange(len(shape))
            shape[place : place + 1] = _split_of(shape[place], draw)
        elif len(shape) > 1:
            place = draw.rng.randrange(len(shape) - 1)
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
        if draw.rng.random() < 0.3:
            shape[draw.rng.randrange(len(shape))] = -1
        return (lambda a: getattr(a.contiguous(), name)(shape)), [x]

    return case


def _flatten(draw):
    x = draw.any(2, 4)
    start = draw.rng.randrange(len(draw.of(x)) - 1)
    return lambda a: a.flatten(start, start + 1), [x]


def _unflatten(draw):
    x = draw.any(1, 3)
    dim = draw.rng.randrange(len(draw.of(x)))
    sizes = _split_of(draw.of(x)[dim], draw)
    return lambda a: a.unflatten(dim, sizes), [x]


def _cat(draw):
    x = draw.any(1)
    dim, shape = draw.dim(x), list(draw.of(x))
    shape[dim] = draw.size()
    others = [draw.tensor(*shape) for _ in range(draw.rng.randint(1, 2))]
    return (lambda *parts: torch.cat(parts, dim)), [x, *others]


def _stack(draw):
    x = draw.any(1, 3)
    dim = draw.rng.randrange(len(draw.of(x)) + 1)
    if draw.rng.random() < 0.2:
        return lambda a: torch.stack([a, a], dim), [x]
    return (lambda a, b: torch.stack([a, b], dim)), [x, draw.tensor(*draw.of(x))]


def _split(draw):
    x = draw.any(1)
    dim = draw.dim(x)
    size = draw.of(x)[dim]
    first = draw.pick([part for part in (1, 2, 4, 8) if part < size] or [size])
    if draw.rng.random() < 0.5 and size > first:
        return lambda a: torch.split(a, [first, size - first], dim), [x]
    return lambda a: a.split(first if size // first <= 4 else size, dim), [x]


def _chunk(draw):
    x = draw.any(1)
    dim, count = draw.dim(x), draw.pick((2, 3))
    return lambda a: a.chunk(count, dim), [x]


def _swap(name):
    def case(draw):
        x = draw.any(2)
        i, j = draw.dim(x), draw.dim(x)
        return lambda a: getattr(a, name)(i, j), [x]

    return case


def _permute(draw):
    x = draw.any(2)
    order = list(range(len(draw.of(x))))
    draw.rng.shuffle(order)
    as_list = draw.rng.random() < 0.5
    return lambda a: a.permute(order) if as_list else a.permute(*order), [x]


def _unsqueeze(draw):
    x = draw.any(1, 3)
    rank = len(draw.of(x))
    dim = draw.rng.randrange(-rank - 1, rank + 1)
    return lambda a: a.unsqueeze(dim), [x]


def _squeeze(draw):
    shape = list(draw.shape(1, 3))
    shape.insert(draw.rng.randint(0, len(shape)), 1)
    x = draw.tensor(*shape)
    dim = draw.pick((None, shape.index(1), -1))
    return lambda a: a.squeeze() if dim is None else a.squeeze(dim), [x]


def _expand(draw):
    shape = draw.shape(1, 3)
    own = [1 if draw.rng.random() < 0.4 else size for size in shape]
    new = [draw.size()] if draw.rng.random() < 0.4 else []
    wanted = [
        *new,
        *(-1 if size == have and draw.rng.random() < 0.5 else size for size, have in zip(shape, own, strict=True)),
    ]
    return lambda a: a.expand(*wanted), [draw.tensor(*own)]


def _repeat_interleave(draw):
    x = draw.any(1, 3)
    dim = draw.dim(x)
    size = draw.of(x)[dim] * 2
    if draw.rng.random() < 0.3:
        return lambda a: torch.repeat_interleave(a, 2, dim=dim, output_size=size), [x]
    return lambda a: a.repeat_interleave(2, dim), [x]


def _unbind(draw):
    x = draw.any(2)
    dim = draw.dim(x)
    return (lambda a: a.unbind(dim)) if draw.of(x)[dim] <= 4 else (lambda a: a.narrow(dim, 0, 3).unbind(dim)), [x]


def _as_other(draw):
    x = draw.any(2, 4)
    shape = list(draw.of(x))
    place = draw.rng.randrange(len(shape) - 1)
    other = [*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :]]
    ways = (("reshape_as", x, draw.tensor(*other)), ("reshape_as", draw.tensor(*other), x))
    return ways[draw.rng.randrange(2)]


def _viewed_as(name):
    def case(draw):
        _, x, other = _as_other(draw)
        return (lambda a, b: getattr(a.contiguous(), name)(b) + b), [x, other]

    return case


def _expanded_as(draw):
    shape = draw.shape(1, 3)
    own = [1 if draw.rng.random() < 0.4 else size for size in shape]
    return (lambda a, b: a.expand_as(b) * b), [draw.tensor(*own), draw.tensor(*shape)]


def _typed_as(draw):
    x = draw.any(1)
    return (lambda a, b: a.float().type_as(b) + b.sum()), [x, draw.any(1)]


def _looked_up(draw):
    table = draw.any(1, 3)
    places = draw.integers(*draw.shape(1, 2), below=draw.of(table)[0])
    return (lambda a, i: a[i]), [table, places]


def _item(draw):
    if draw.rng.random() < 0.3:
        return _looked_up(draw)
    x = draw.any(1)
    rank = len(draw.of(x))
    index = []
    for size in draw.of(x):
        index.append(
            draw.pick(
                (
                    slice(None),
                    slice(None),
                    slice(1, None),
                    slice(0, size - 1),
                    slice(None, None, 2),
                    slice(1, None, 2),
                    0,
                    -1,
                )
            )
        )
    index = index[: draw.rng.randint(1, rank)]
    if draw.rng.random() < 0.4:
        index.insert(draw.rng.randint(0, len(index)), draw.pick((None, Ellipsis)))
    return lambda a: a[tuple(index)], [x]


def _attribute(draw):
    name = draw.pick(("T", "mT"))
    return lambda a: getattr(a, name), [draw.any(2, 2 if name == "T" else 4)]


# -- products ------------------------------------------------------------------------------------------------------------


def _linear(draw):
    x, rows = draw.any(1), draw.size()
    columns = draw.of(x)[-1]
    bias = [draw.tensor(rows)] if draw.rng.random() < 0.5 else []
    return (lambda a, w, *b: F.linear(a, w / 3, *b)) if draw.rng.random() < 0.3 else F.linear, [
        x,
        draw.tensor(rows, columns),
        *bias,
    ]


def _addmm(draw):
    x, columns = draw.any(2, 2), draw.size()
    rows, inner = draw.of(x)
    added = draw.tensor(*draw.pick(((columns,), (1, columns), (rows, columns), (rows, 1))))
    scales = draw.pick(({}, {"beta": 0.5, "alpha": 2.0}))
    return (lambda b, a, w: torch.addmm(b, a, w, **scales)), [added, x, draw.tensor(inner, columns)]


def _matmul(function):
    def case(draw):
        x, columns = draw.any(2, 4), draw.size()
        *batch, _, inner = draw.of(x)
        first = draw.rng.randint(0, len(batch))
        batch = [1 if draw.rng.random() < 0.2 else size for size in batch[first:]]
        other = draw.tensor(*batch, inner, columns)
        return (lambda a, b: function(a, b)), [x, other]

    return case


def _reversed_matmul(draw):
    x, columns = draw.any(2, 3), draw.size()
    return (lambda a, b: b.__rmatmul__(a)), [x, draw.tensor(draw.of(x)[-1], columns)]


def _bmm(draw):
    x = draw.any(3, 3)
    batch, _, inner = draw.of(x)
    return torch.bmm, [x, draw.tensor(batch, inner, draw.size())]


def _baddbmm(draw):
    x = draw.any(3, 3)
    batch, rows, inner = draw.of(x)
    columns = draw.size()
    added = draw.tensor(*draw.pick(((batch, rows, columns), (batch, 1, columns), (columns,))))
    return (lambda b, a, w: torch.baddbmm(b, a, w, beta=0.5)), [added, x, draw.tensor(batch, inner, columns)]


def _einsum(draw):
    b, s, h, d = (draw.size() for _ in range(4))
    equation, first, second = draw.pick(
        (("bsh,hd->bsd", (b, s, h), (h, d)), ("bsh,bdh->bsd", (b, s, h), (b, d, h)), ("bsh,bsh->b", (b, s, h), (b, s, h)),
         ("bsh,dh->dbs", (b, s, h), (d, h)), ("bsh,hd->bsd", (b, s, 1), (h, d)), ("bs,bsd->sd", (b, s), (b, s, d)))
    )  # fmt: skip
    return (lambda a, w: torch.einsum(equation, a, w)), [draw.tensor(*first), draw.tensor(*second)]


def _embedding(draw):
    rows, columns = draw.pick((8, 12, 6)), draw.size()
    ids = draw.integers(*draw.shape(1, 2), below=rows)
    options = draw.pick(({}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}))
    return (lambda i, table: F.embedding(i, table, **options)), [ids, draw.tensor(rows, columns)]


def _attention(draw):
    batch, heads, length, keys, width = draw.pick((4, 2)), draw.pick((4, 8, 6)), draw.size(), draw.size(), 4
    shared = draw.pick((heads, heads, heads // 2, 1))
    causal = draw.rng.random() < 0.3
    keys = length if causal else keys
    query, key, value = (draw.tensor(batch, n, m, width) for n, m in ((heads, length), (shared, keys), (shared, keys)))
    options = {"is_causal": causal, "enable_gqa": shared != heads}
    if causal or draw.rng.random() < 0.4:
        return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)), [query, key, value]
    mask = draw.tensor(
        *draw.pick(((length, keys), (1, 1, length, keys), (batch, 1, 1, keys), (1, heads, length, keys)))
    )
    return (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, **options)), [query, key, value, mask]


# -- what mixes elements -------------------------------------------------------------------------------------------------


def _normalised(function):
    def case(draw):
        x = draw.any(2)
        shape = draw.of(x)[-draw.rng.randint(1, len(draw.of(x)) - 1) :]
        own = [draw.tensor(*shape) for _ in range(draw.pick((0, 1) if function is F.rms_norm else (0, 1, 2)))]
        return (lambda a, *w: function(a, shape, *w)), [x, *own]

    return case


def _along_one(function):
    def case(draw):
        x = draw.any(1)
        dim = draw.dim(x)
        return lambda a: function(a, dim), [x]

    return case


def _reduction(name):
    def case(draw):
        x = draw.any(1)
        rank, form = len(draw.of(x)), draw.rng.randrange(4)
        options = {"correction": 0} if name in ("var", "std") else {}
        if form == 0 and name != "logsumexp":
            return lambda a: getattr(a, name)(**options), [x]
        dims = draw.rng.sample(range(rank), draw.rng.randint(1, rank))
        dims = dims if draw.rng.random() < 0.6 else dims[0]
        return lambda a: getattr(a, name)(dims, keepdim=form > 1, **options), [x]

    return case


def _mask_sum(draw):
    x = draw.any(1)
    dim = draw.dim(x)
    return lambda a: (a > 0).sum(dim, keepdim=True).double() * a, [x]


def _cross_entropy(draw):
    rows, classes = draw.size(), draw.pick((8, 12))
    options = draw.pick(
        ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 1}, {"reduction": "none"})
    )
    return (lambda x, y: F.cross_entropy(x, y, **options)), [
        draw.tensor(rows, classes),
        draw.integers(rows, below=classes),
    ]


_OPERATORS = {
    "neg": unary(torch.neg), "__neg__": unary(lambda x: -x), "__rsub__": unary(lambda x: 1.0 - x),
    "__rpow__": unary(lambda x: 2.0**x),
    "__pow__": unary(lambda x: _positive(x).__pow__(1.5)), "__rdiv__": unary(lambda x: x.abs().add(0.5).__rdiv__(2.0)),
    "__eq__": logical(lambda a, b: a == b, 2), "__and__": logical(lambda a, b: a & b, 2),
    "__or__": logical(lambda a, b: a | b, 2), "__xor__": logical(lambda a, b: a ^ b, 2), "__invert__": logical(lambda a: ~a, 1),
    "logical_not": logical(torch.logical_not, 1), "logical_and": logical(torch.logical_and, 2),
    "logical_or": logical(torch.logical_or, 2), "isnan": logical(torch.isnan, 1), "isinf": logical(torch.isinf, 1),
}  # fmt: skip
_PLAIN = (
    "exp", "square", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "sign", "floor", "ceil", "round", "clone",
    "detach", "nan_to_num",
)  # fmt: skip
_OF_POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal")
_ACTIVATIONS = (
    "relu6", "gelu", "silu", "mish", "elu", "selu", "leaky_relu", "softplus", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid",
)  # fmt: skip

RULED = {
    **_OPERATORS,
    **{name: unary(getattr(torch.Tensor, name)) for name in _PLAIN},
    **{name: unary(getattr(torch, name), _positive) for name in _OF_POSITIVE},
    **{name: unary(getattr(F, name)) for name in _ACTIVATIONS},
    **{name: binary(getattr(torch, name)) for name in ("sub", "mul")},
    **{name: binary(lambda a, b, f=name: getattr(torch, f)(torch.as_tensor(a), torch.as_tensor(b))) for name in ("minimum", "maximum")},
    **{name: comparison(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: unary(lambda x, f=name: getattr(x, f)().double() * x) for name in ("float", "half", "bfloat16")},
    **{name: unary(lambda x, f=name: getattr(torch, f)(x) + x) for name in ("zeros_like", "ones_like")},
    "abs": unary(torch.abs), "__abs__": unary(abs), "double": unary(lambda x: x.float().double()),
    "contiguous": lambda draw: (lambda x: x.mT.contiguous(), [draw.any(2)]),
    "full_like": unary(lambda x: torch.full_like(x, 0.5) * x),
    "type": unary(lambda x: x.type(torch.float32).double()),
    "add": lambda draw: draw.pick((binary(torch.add), _scaled_add))(draw),
    "div": _division, "true_divide": binary(lambda a, b: torch.true_divide(a, _positive(b) if isinstance(b, torch.Tensor) else b)),
    "pow": unary(lambda x: _positive(x).pow(1.5)),
    "clamp": lambda draw: draw.pick((_clamped, unary(lambda x: x.clamp(-0.5, 0.5))))(draw),
    "rsub": unary(lambda x: torch.rsub(x, 1.5)), **{name: unary(getattr(torch, name)) for name in ("exp2", "expm1")},
    "log2": unary(torch.log2, _positive),
    "clip": unary(lambda x: x.clip(max=0.25)),
    "where": _where, "masked_fill": _masked_fill, "dropout": _dropout, "to": _to,
    "addcmul": _three(lambda a, b, c: torch.addcmul(a, b, c, value=0.5)), "lerp": _three(torch.lerp),
    **{name: _reshape(name) for name in ("view", "reshape")},
    "flatten": _flatten, "unflatten": _unflatten, "cat": _cat, "stack": _stack, "split": _split, "chunk": _chunk,
    **{name: _swap(name) for name in ("transpose", "swapaxes", "swapdims")},
    "permute": _permute, "t": lambda draw: (lambda a: a.t(), [draw.any(2, 2)]), "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    **{name: _viewed_as(name) for name in ("reshape_as", "view_as")}, "expand_as": _expanded_as, "type_as": _typed_as,
    "expand": _expand, "repeat_interleave": _repeat_interleave, "unbind": _unbind, GETITEM: _item, GETATTR: _attribute,
    "linear": _linear, "addmm": _addmm, "matmul": _matmul(torch.matmul),
    "__rmatmul__": _reversed_matmul, "bmm": _bmm, "baddbmm": _baddbmm, "einsum": _einsum, "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **IMAGES,
    "topk": _along_one(lambda x, dim: x.topk(min(2, x.shape[dim]), dim)[0]), "sort": _along_one(lambda x, dim: x.sort(dim)[0]),
    "normalize": _along_one(lambda x, dim: F.normalize(x, dim=dim)), "glu": _along_one(lambda x, dim: F.glu(torch.cat([x, x], dim), dim)),
    "layer_norm": _normalised(F.layer_norm), "rms_norm": _normalised(F.rms_norm),
    "softmax": _along_one(torch.softmax), "log_softmax": _along_one(F.log_softmax), "cumsum": _along_one(torch.cumsum),
    **{name: _reduction(name) for name in ("mean", "var", "std", "amax", "amin", "logsumexp")},
    "sum": lambda draw: draw.pick((_reduction("sum"), _mask_sum))(draw),
    "cross_entropy": _cross_entropy,
}  # fmt: skip
