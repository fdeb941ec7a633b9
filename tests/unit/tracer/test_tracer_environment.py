"""What a recording's Python read besides its inputs: guards tell every change, and what is put back holds again."""

import collections
import contextvars
import functools
import gc
import itertools
import math
import random
import types

import pytest
import torch
from applied import applying
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smpc.errors import TraceError
from smpc.tracer.attempt import RecordingRequest
from smpc.tracer.environment.memory_words import DictVersions
from smpc.tracer.ir import NodeKind
from smpc.tracer.record import record_guarded

X = torch.ones(2, 4)
SHIFT = 0.5
COUNT = 0
KEPT = []


def environment_of(model):
    return record_guarded(model, RecordingRequest((X,), {})).environment


class Slotted:
    """An object without a dict."""

    __slots__ = ("scale",)


class Rows(dict):
    """A dict of one's own kind, whose items are attributes."""

    __getattr__ = dict.__getitem__


class Base(nn.Module):
    FACTOR = 2.0


def shifted(x):
    return x + 1


def other_shifted(x):
    return x - 1


PLAIN_CODE = shifted.__code__


class OtherLinear(nn.Linear):
    """What a linear map may become."""


class OtherSlotted(Slotted):
    """What a `Slotted` may become."""

    __slots__ = ()


class Reader(Base):
    """Reads in many ways."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()
        self.config = types.SimpleNamespace(scale=1.5, rows={"a": [1, 2]})
        self.slotted, self.unread = Slotted(), 0
        self.slotted.scale = 3.0
        self.partial = functools.partial(torch.mul, other=2.0)
        self.own, self.user, self.baked = Rows(a=1.0), collections.UserDict(a=1.0), functools.partial(torch.add, X)

    @property
    def half(self):
        return 0.5 * self.FACTOR

    def row(self, x):
        return x * self.config.scale

    def forward(self, x):
        x = torch.vmap(self.row)(self.act(self.linear(x)) * self.half)
        x = shifted(self.baked(x)) * self.own.a * self.user["a"] + getattr(self.config, "extra", 0.0)
        return self.partial(x) * self.slotted.scale + self.config.rows["a"][0] + SHIFT


def patch_shift(model):
    globals()["SHIFT"] = 0.75


CHANGES = {
    "FACTOR": lambda m: setattr(Base, "FACTOR", 3.0),
    "FACTOR before that of the base": lambda m: setattr(Reader, "FACTOR", 3.0),
    "Rows": lambda m: m.own.update(a=2.0),
    "data of a UserDict": lambda m: m.user.update(a=2.0),
    "baked": lambda m: setattr(m, "baked", functools.partial(torch.add, X + 1)),
    "extra of a SimpleNamespace": lambda m: setattr(m.config, "extra", 1.0),
    "class of a Slotted": lambda m: setattr(m.slotted, "__class__", OtherSlotted),
    "class of a module": lambda m: setattr(m.linear, "__class__", OtherLinear),
    "code": lambda m: setattr(shifted, "__code__", other_shifted.__code__),
    "requires_grad": lambda m: m.linear.bias.requires_grad_(False),
    "scale": lambda m: setattr(m.config, "scale", 2.5),
    "rows": lambda m: m.config.rows["a"].append(3),
    "scale of a Slotted": lambda m: setattr(m.slotted, "scale", 4.0),
    "partial": lambda m: m.partial.keywords.update(other=3.0),
    "SHIFT": patch_shift,
    "act": lambda m: setattr(m, "act", nn.Tanh()),
    "forward": lambda m: setattr(m.act, "forward", torch.tanh),
    "row": lambda m: setattr(m, "row", torch.tanh),
}


@pytest.fixture(autouse=True)
def _restore():
    yield
    globals()["SHIFT"] = 0.5
    Base.FACTOR, shifted.__code__ = 2.0, PLAIN_CODE
    if "FACTOR" in vars(Reader):
        del Reader.FACTOR
    KEPT.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name):
    model = Reader()
    environment = environment_of(model)
    assert environment.difference() is None
    model.unread = 1
    model.another = "nobody reads it"
    assert environment.difference() is None
    CHANGES[name](model)
    assert name.split()[0] in str(environment.difference())


class ReadsAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale_a = nn.Linear(4, 4), 0.5

    def forward(self, x):
        for name, value in vars(self).items():
            x = x * value if name.startswith("scale_") else x
        return self.linear(x)


def test_an_attribute_more_is_told_where_all_are_read():
    model = nn.Sequential(ReadsAll())
    environment = environment_of(model)
    model[0].scale_b = 2.0
    assert str(environment.difference()) == "attribute 'scale_b' of module '0': 2.0, which was missing"


class ReadsAConstant(nn.Module):
    def forward(self, x):
        return x * math.tau


def test_a_constant_of_the_standard_library_is_told(monkeypatch):
    environment = environment_of(ReadsAConstant())
    assert environment.difference() is None
    monkeypatch.setattr(math, "tau", 3.0)
    assert "'tau' of math" in str(environment.difference())


def test_what_is_put_back_holds():
    model = Reader()
    environment = environment_of(model)
    for value in (0.25, 1.5, 0.25, 1.5, 0.5, 1.5, 0.75, 1.5):
        model.config.scale = value
        assert (environment.difference() is None) == (value == 1.5)


class Stateful(nn.Module):
    """`act` reads state of its own and changes it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen, self.ticks = nn.Linear(4, 4), 0, [], itertools.count()

    def forward(self, x):
        return self.act(self.linear(x))


class Counts(Stateful):
    def act(self, x):
        self.calls += 1
        return x * self.calls


class Collects(Stateful):
    def act(self, x):
        self.seen.append(x.detach())
        return x * len(self.seen)


class Ticks(Stateful):
    def act(self, x):
        return x * next(self.ticks)


class CountsGlobally(Stateful):
    def act(self, x):
        global COUNT
        COUNT += 1
        return x * COUNT


class CountsByClass(Stateful):
    total = 0

    def act(self, x):
        type(self).total += 1
        return x * self.total


class KeepsInDefault(Stateful):
    """The first call's tensor was kept for that call alone, and later calls had their own."""

    def act(self, x, kept={}):  # noqa: B006
        if not kept:
            kept["mean"] = x.mean()
        return x * kept["mean"]


class KeepsInNamedDefault(Stateful):
    def act(self, x, *, kept=[]):  # noqa: B006
        if not kept:
            kept.append(x.mean())
        return x * kept[0]


@pytest.mark.parametrize("kind", [Counts, Collects, Ticks])
def test_state_of_one_module_has_it_called_whole(kind):
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    trace = record_guarded(model, RecordingRequest((X,), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    assert model[1].calls == 0
    assert not model[1].seen


@pytest.mark.parametrize(
    "kind", [Counts, Collects, Ticks, CountsGlobally, CountsByClass, KeepsInDefault, KeepsInNamedDefault]
)
def test_state_that_belongs_to_no_module_that_can_be_called_whole_is_refused(kind):
    with pytest.raises(TraceError, match=r"forward reads .* and changes it .*; what to do: .* buffer"):
        record_guarded(kind(), RecordingRequest((X,), {}))
    assert (COUNT, CountsByClass.total) == (0, 0)


class CountsInOwnDict(Stateful):
    """In an object that gets the attribute when it is first called, and in a dict of one's own kind."""

    def __init__(self):
        super().__init__()
        self.state, self.rows = types.SimpleNamespace(), Rows(n=0)

    def act(self, x):
        self.state.n = getattr(self.state, "n", 0) + 1
        self.rows["n"] += 1
        return x * self.state.n * self.rows["n"]


def test_state_in_objects_and_own_containers_is_seen():
    """A new attribute of an object, and what a subclass of dict holds, were not looked at."""
    model = nn.Sequential(nn.Linear(4, 4), CountsInOwnDict(), nn.Linear(4, 4))
    trace = record_guarded(model, RecordingRequest((X,), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]


class SharedState(nn.Module):
    """Two modules count with one dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Counts(), Counts()
        self.a.shared = self.b.shared = {"n": 0}
        for module in (self.a, self.b):
            module.act = functools.partial(self.count, module)

    @staticmethod
    def count(module, x):
        module.shared["n"] += 1
        return x * module.shared["n"]

    def forward(self, x):
        return self.b(self.a(x))


def test_state_that_modules_share_is_refused():
    with pytest.raises(TraceError, match="and changes it"):
        record_guarded(SharedState(), RecordingRequest((X,), {}))


class Cached(nn.Module):
    """Keeps a mask that depends on sizes alone."""

    def __init__(self, drop=False):
        super().__init__()
        self.linear, self.mask, self.drop = nn.Linear(4, 4), None, drop

    def forward(self, x):
        if self.mask is None or self.mask.shape[0] < x.shape[0]:
            self.mask = torch.triu(torch.ones(x.shape[0], x.shape[0]))
            if self.drop:
                x = x * 2
        return self.mask @ self.linear(x)


def test_a_cache_of_sizes_is_recorded_and_holds_full_and_empty():
    model = Cached()
    recording = record_guarded(model, RecordingRequest((X,), {}))
    assert "torch.triu" in [node.target for node in recording.trace.nodes]
    assert model.mask is None
    assert recording.environment.difference() is None
    model(X)
    assert recording.environment.difference() is None
    model.mask = "something else"
    assert recording.environment.difference() is not None


def test_a_first_call_that_differs_from_later_ones_is_refused():
    with pytest.raises(TraceError, match="attribute 'mask' of the model"):
        record_guarded(Cached(drop=True), RecordingRequest((X,), {}))


@functools.lru_cache
def cached_mask(size):
    return torch.triu(torch.ones(size, size))


class UsesLruCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return cached_mask(x.shape[0]) @ self.linear(x)


def test_caches_of_functions_forget_what_a_recording_has_made():
    """A mask in an lru_cache made the next eager call return a FakeTensor."""
    cached_mask.cache_clear()
    model = UsesLruCache()
    record_guarded(model, RecordingRequest((X,), {}))
    assert not isinstance(model(X), FakeTensor)


@functools.lru_cache
def cached_shift():
    return SHIFT


class UsesCachedGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + cached_shift()


def test_what_a_cached_function_has_read_is_guarded_when_the_cache_answers():
    """A second attempt of one recording found the cache full, and noted nothing."""
    model = UsesCachedGlobal()
    for clears in (True, False):
        if clears:
            cached_shift.cache_clear()
        environment = environment_of(model)
        assert environment.difference() is None
        patch_shift(model)
        assert "global 'SHIFT'" in str(environment.difference())
        globals()["SHIFT"] = 0.5


loss = None


class HasALoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), nn.MSELoss()

    def forward(self, x):
        return self.loss(self.linear(x), x).sqrt()


def test_a_global_that_is_called_like_an_attribute_is_not_read(monkeypatch):
    """A training loop keeps its loss in a global of that name: every step had been recorded again."""
    environment = environment_of(HasALoss())
    monkeypatch.setitem(globals(), "loss", torch.ones(()))
    monkeypatch.setitem(globals(), "sqrt", 1.0)
    assert environment.difference() is None


class KeepsGlobally(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 4), types.MappingProxyType({"keep": KEPT.append})

    def forward(self, x):
        x = self.linear(x)
        self.keep["keep"](x)
        return x


def test_tensors_that_are_kept_elsewhere_are_refused():
    with pytest.raises(TraceError, match=r"beyond the call|and changes it"):
        record_guarded(KeepsGlobally(), RecordingRequest((X,), {}))


def test_a_recording_leaves_no_tensor_and_the_garbage_collector_as_it_was():
    enabled, frozen, state = gc.isenabled(), gc.get_freeze_count(), random.getstate()
    before = sum(type(item) is FakeTensor for item in gc.get_objects())
    record_guarded(Reader(), RecordingRequest((X,), {}))
    assert (gc.isenabled(), gc.get_freeze_count(), random.getstate()) == (enabled, frozen, state)
    assert sum(type(item) is FakeTensor for item in gc.get_objects()) <= before


def test_versions_tell_which_dicts_were_written_to():
    rng, versions = random.Random(0), DictVersions()
    dicts = [{"a": 0} for _ in range(50)]
    positions = [versions.watch(item) for item in dicts]
    for _ in range(200):
        before = versions.generation
        written = rng.sample(range(50), rng.choice((0, 0, 1, 3)))
        for index in written:
            dicts[index]["a"] += 1
        versions.poll()
        assert {i for i in range(50) if versions.changed_in[positions[i]] > before} == set(written)


class Rebuilds(nn.Module):
    """Makes another module around the same layer in its first call, as BigBird does for short inputs."""

    def __init__(self):
        super().__init__()
        self.body, self.is_short = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), False

    def forward(self, x):
        if not self.is_short:
            self.body, self.is_short = nn.Sequential(self.body[0], nn.ReLU()), True
        return self.body(x)


def test_a_module_that_forward_makes_is_named():
    """It was a KeyError with a number."""
    model = Rebuilds()
    request = RecordingRequest((torch.ones(2, 4),), {})
    text = r"environment.py:\d+: forward puts a new Sequential into the model, as body; what to do: run the model once by itself"
    with pytest.raises(TraceError, match=text):
        record_guarded(model, request)
    assert isinstance(model.body[1], nn.Tanh)
    inside = nn.Sequential(nn.Linear(4, 4), model)
    trace = record_guarded(inside, request).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    assert isinstance(model.body[1], nn.Tanh), "a recording leaves the model as it was"
    model(torch.ones(2, 4))
    trace = record_guarded(model, request).trace
    assert not [node for node in trace.nodes if node.kind is NodeKind.CALL_MODULE]


class AsksAttribute(nn.Module):
    """Reads an attribute that a script gives to a buffer, or to a plain tensor."""

    def __init__(self, is_buffer):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if is_buffer:
            self.register_buffer("shift", torch.ones(1))
        else:
            self.shift = torch.ones(1)

    def forward(self, x):
        return self.linear(x) + self.shift * (self.shift.scale if hasattr(self.shift, "scale") else 0.5)


def _given(scale):
    tensor = torch.ones(1)
    if scale is not None:
        tensor.scale = scale
    return tensor


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("before", [None, 2.0])
@pytest.mark.parametrize("after", [None, 2.0, 3.0])
def test_a_tensor_that_takes_the_place_of_another_brings_its_attributes(is_buffer, before, after):
    """Those of the one that was there when the model was recorded were looked at."""
    model = AsksAttribute(is_buffer)
    model.shift = _given(before)
    environment = record_guarded(model, RecordingRequest((torch.ones(2, 4),), {})).environment
    assert environment.difference() is None
    model.shift = _given(after)
    assert (environment.difference() is None) == (after == before)
    if is_buffer:
        model.shift = _given(before)
        assert environment.difference() is None
        model.shift.scale = 4.0  # of one that came later
        assert environment.difference() is not None


class Settings:
    def __init__(self):
        self.scale, self.table = 2.0, {"scale": 2.0}


@functools.lru_cache
def one_settings():
    return Settings()


@functools.lru_cache(maxsize=2)
def table_of(name):
    return {"scale": 2.0, "name": name}


@functools.cache
def scales():
    return [2.0]


of_context = contextvars.ContextVar("of_context", default=Settings())  # noqa: B039  the default is what is tested
CACHED = {  # what forward reads, what a script does then
    "an attribute": (lambda: one_settings().scale, lambda: setattr(one_settings(), "scale", 3.0)),
    "what it holds": (lambda: one_settings().table["scale"], lambda: one_settings().table.update(scale=3.0)),
    "a dict": (lambda: table_of("a")["scale"], lambda: table_of("a").update(scale=3.0)),
    "a list": (lambda: scales()[0], lambda: scales().clear()),
    "another one": (lambda: one_settings().scale, one_settings.cache_clear),
    "a context variable's default": (lambda: of_context.get().scale, lambda: setattr(of_context.get(), "scale", 3.0)),
}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("name", CACHED)
def test_what_is_kept_without_a_name_is_guarded(name, is_early):
    """A function that a cache answers for runs no code, so nothing was seen to be read."""
    read, change = CACHED[name]
    for cached in (one_settings, table_of, scales):
        cached.cache_clear()
    of_context.get().scale = 2.0
    if is_early:
        read()
    environment = record_guarded(
        applying(lambda _, x: x * read()), RecordingRequest((torch.ones(2, 4),), {})
    ).environment
    assert environment.difference() is None
    table_of("b")  # something else that is kept
    assert environment.difference() is None
    change()
    assert environment.difference() is not None


@functools.lru_cache
def counted_settings():
    return types.SimpleNamespace(calls=0)


def test_what_forward_changes_in_a_cache_is_refused():
    def count(_, x):
        counted_settings().calls += 1
        return x * counted_settings().calls

    counted_settings()
    with pytest.raises(TraceError, match="changes it"):
        record_guarded(applying(count), RecordingRequest((torch.ones(2, 4),), {}))
    assert counted_settings().calls == 0


class Hooked(nn.Module):
    """Registers a hook on a layer of its own, or on one further inside, for one call, once, or again and again."""

    def __init__(self, on, kind="forward", *, leaves_it=False, once=False):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.on, self.kind, self.leaves_it, self.once, self.done = on, kind, leaves_it, once, False

    def forward(self, x):
        if not (self.once and self.done):
            handle = self._registered(self.get_submodule(self.on))
            self.done = True
        y = self.inner(x)
        if not self.leaves_it:
            handle.remove()
        return y

    def _registered(self, module):
        if self.kind == "forward":
            return module.register_forward_hook(lambda module, arguments, output: output * 2)
        if self.kind == "pre":
            return module.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 0.5,))
        return module.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))


@pytest.mark.parametrize("kind", ["forward", "pre"])
@pytest.mark.parametrize("on", ["inner", "inner.1", "inner.1.0"])
def test_a_module_is_not_called_without_the_code_that_registers_its_hook(kind, on):
    """Stages called it as it was: what its hook does was lost, without a word."""
    trace = record_guarded(Hooked(on, kind), RecordingRequest((X,), {})).trace
    around = {".".join(on.split(".")[:end]) for end in range(1, 4)}
    for call in trace.calls:
        assert call.whole == (call.fqn not in around)


@pytest.mark.parametrize("once", [False, True])
def test_a_hook_that_stays_for_the_next_call_has_its_module_called_whole(once):
    model = nn.Sequential(nn.Linear(4, 4), Hooked("inner.0", leaves_it=True, once=once), nn.Linear(4, 4))
    trace = record_guarded(model, RecordingRequest((X,), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    with pytest.raises(TraceError, match=r"registers a hook on module 'inner\.0', and leaves it for the next call"):
        record_guarded(Hooked("inner.0", leaves_it=True, once=once), RecordingRequest((X,), {}))


def test_a_backward_hook_has_the_module_that_registers_it_called_whole():
    model = nn.Sequential(nn.Linear(4, 4), Hooked("inner.0", "backward"), nn.Linear(4, 4))
    trace = record_guarded(model, RecordingRequest((X,), {})).trace
    assert [node.target for node in trace.nodes if node.kind is NodeKind.CALL_MODULE] == ["1"]
    with pytest.raises(TraceError, match=r"registers a backward hook on module 'inner\.0'"):
        record_guarded(Hooked("inner.0", "backward"), RecordingRequest((X,), {}))


def test_hooks_of_a_library_are_there_in_the_next_call():
    """The second recording knew that they were there, and did not have them: the whole of a Hugging Face model was called as one module."""
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, output_hidden_states=True, use_cache=False))
    recording = record_guarded(model, RecordingRequest((), {"input_ids": torch.ones(1, 4, dtype=torch.int64)}))
    assert not [node.target for node in recording.trace.nodes if node.kind is NodeKind.CALL_MODULE]
    layer = model.model.layers[0]
    assert not layer._forward_hooks
    recording.environment.leave()
    assert len(layer._forward_hooks) == 1, "as the flag says that forward sets"
    assert recording.environment.difference() is None


ASKED = 1


class Asked:
    """Names a global whenever it is asked for something."""

    def __init__(self):
        self.scale = 2.0

    def __getattribute__(self, name):
        return object.__getattribute__(self, name) if ASKED else None


class Asks(nn.Module):
    """Holds such an object, and may ask it."""

    def __init__(self, asks):
        super().__init__()
        self.asked, self.asks = Asked(), asks

    def forward(self, x):
        asked = self.asked
        return x * asked.scale if self.asks else x * 2.0


@pytest.mark.parametrize("asks", [False, True])
def test_what_a_recording_itself_asks_of_objects_is_not_what_the_model_reads(asks):
    guards = record_guarded(Asks(asks), RecordingRequest((X,), {})).environment.guards
    assert any("'ASKED'" in guard.place.text for guard in guards) is asks
