"""Manual assignment: marks on modules become stages, which run bitwise like one process."""

import parity
import pytest
import torch
import torch.nn.functional as F
import zoo
from planning import compile_trace
from torch import nn

from smpc.compile import PipelineOptions, compile_model
from smpc.errors import ConfigError, PartitionError
from smpc.partitioner.graph.trace_graph import check_assignment
from smpc.partitioner.manual import ManualPartition, assign_manually
from smpc.sample_inputs import first_microbatch
from smpc.tracer import mark_leaf, record


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(model, batch, marks, default=0, *, ranks=2, microbatches=4, pipeline="interleaved"):
    manual = ManualPartition(tuple(marks.items()), default)
    return compile_model(
        model, batch, pipeline_parallel_degree=ranks, microbatches=microbatches, pipeline=pipeline, manual=manual
    )


def assert_parity(model, batch, compilation):
    expected = parity.run_eager(model, batch, compilation.plan.schedule.num_microbatches)
    got = parity.run_loopback(model, compilation, batch)
    parity.assert_same(expected, got, tuple(item.name for item in compilation.plan.shared_parameters))


def ranks_of(compilation):
    return tuple(stage.rank for stage in compilation.plan.stages)


def modules_of(compilation):
    return [stage.modules for stage in compilation.plan.stages]


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.inner(x).tanh()) + x


class Children(nn.Module):
    """Four children, called in this order; what is between and after them belongs to the model's own forward."""

    def __init__(self):
        super().__init__()
        self.child0, self.child1, self.child2, self.child3 = (Child() for _ in range(4))

    def forward(self, x):
        h = self.child0(x * 2)
        h = self.child1(h) + torch.arange(6)
        h = F.relu(self.child2(h)) + h
        h = self.child3(h)
        return (h**2).mean(1)


SEED = {"child0": 1, "child1": 2, "child2": 1}  # the example of the reference, child3 by default


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_example_of_the_reference(pipeline, microbatches):
    torch.manual_seed(0)
    model, batch = Children(), ((torch.randn(8, 6),), {})
    compilation = compiled(model, batch, SEED, ranks=3, microbatches=microbatches, pipeline=pipeline)
    assert ranks_of(compilation) == (1, 2, 1, 0)
    assert modules_of(compilation) == [("child0",), ("child1",), ("child2",), ("child3",)]
    assert compilation.plan.pipeline_parallel_degree == 3
    assert compilation.plan.objective.note == "", "gradients are summed as in one process"
    assert_parity(model, batch, compilation)


def test_what_the_model_itself_does_goes_with_what_ran_before():
    trace = record(Children(), (torch.randn(8, 6),))
    assignment, placement = assign_manually(trace, SEED, 0, num_ranks=3)
    check_assignment(trace, assignment, 4)
    assert placement == (1, 2, 1, 0)
    own = [
        (node.target.rpartition(".")[2], assignment[node.name])
        for node in trace.nodes
        if node.call == 0 and node.name in assignment
    ]
    assert [stage for name, stage in own if name == "mul"] == [0], "before the first: with the first, which uses it"
    assert [stage for name, stage in own if name in ("relu", "mean")] == [2, 3]
    assert [stage for name, stage in own if name == "arange"] == [1], "where it is first used"


def test_the_innermost_mark_counts_and_is_inherited():
    model, batch = Children(), ((torch.randn(8, 6),), {})
    marks = {"": 1, "child1": 0, "child1.norm": 1, "child3": 0}
    compilation = compiled(model, batch, marks)
    assert ranks_of(compilation) == (1, 0, 1, 0, 1, 0, 1)
    assert modules_of(compilation) == [
        ("child0",),
        ("child1.inner",),
        ("child1.norm",),
        (),  # what child1 itself adds
        ("child2",),
        ("child3",),
        (),  # what the model itself does after it
    ]
    assert_parity(model, batch, compilation)


def test_a_module_without_marks_around_or_inside_goes_to_the_default():
    batch = ((torch.randn(8, 6),), {})
    compilation = compiled(Children(), batch, {"child1.inner": 0}, default=1)
    assert ranks_of(compilation) == (1, 0, 1)
    only = compiled(Children(), batch, {}, default=0, ranks=1)
    assert ranks_of(only) == (0,)


GPT2 = {f"transformer.h.{i}": rank for i, rank in enumerate((1, 2, 1, 0))}


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_gpt2_blocks_on_1_2_1_0(pipeline):
    model, batch = zoo.build("gpt2")
    marks = {**GPT2, "transformer.wte": 1, "transformer.wpe": 1, "transformer.drop": 1}
    compilation = compiled(model, batch, marks, ranks=3, pipeline=pipeline)
    assert ranks_of(compilation) == (1, 2, 1, 0)
    assert modules_of(compilation)[1:] == [
        ("transformer.h.1",),
        ("transformer.h.2",),
        ("transformer.h.3", "transformer.ln_f", "lm_head"),
    ]
    assert_parity(model, batch, compilation)


CASES = [
    ("t5", {"encoder": 1, "decoder": 0}, 0, (1, 0)),
    ("t5", {"encoder": 0, "decoder": 1}, 0, (0, 1, 0)),
    ("t5", {"encoder.block.1": 1, "decoder.block.0": 1}, 0, (0, 1, 0, 1, 0)),
    ("llama", {"model.layers.0": 1, "model.layers.1": 1}, 0, (0, 1, 0)),
    ("gpt2_tied", {"transformer.h.0": 1, "lm_head": 1}, 0, (0, 1, 0, 1)),
]


@pytest.mark.long
@pytest.mark.matrix(2)
@pytest.mark.parametrize(("name", "marks", "default", "placement"), CASES, ids=lambda value: str(value)[:40])
def test_models_by_hand(name, marks, default, placement):
    model, batch = zoo.build(name)
    compilation = compiled(model, batch, marks, default)
    assert ranks_of(compilation) == placement
    assert_parity(model, batch, compilation)


def test_every_block_of_a_unet_by_turns():
    model, batch = zoo.build("unet")
    names = [name for name, _ in model.named_children()]
    marks = {name: i % 2 for i, name in enumerate(names)}
    compilation = compiled(model, batch, marks)
    assert set(ranks_of(compilation)) == {0, 1}
    assert_parity(model, batch, compilation)
    held = {rank: set() for rank in (0, 1)}
    for stage in compilation.plan.stages:
        held[stage.rank].update(stage.parameters)
    for name, _ in model.named_parameters():
        assert name in held[marks[name.split(".")[0]]]


def test_another_signature_keeps_the_ranks():
    model, batch = zoo.build("gpt2")
    first = compiled(model, batch, GPT2, ranks=3)
    trace = record(model.eval(), *first_microbatch(batch, 2))
    again = compile_trace(trace, PipelineOptions(3, 2), like=first)
    assert [(s.rank, s.parameters) for s in again.plan.stages] == [(s.rank, s.parameters) for s in first.plan.stages]


class Writes(nn.Module):
    """The second child writes into what the first has made."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.writer = Writer()

    def forward(self, x):
        h = self.first(x)
        g = self.second(x)
        return self.third(self.writer(h)) + g


class Writer(nn.Module):
    def forward(self, h):
        return h.add_(1)


def test_modules_that_cannot_be_separated_are_named():
    trace = record(Writes(), (torch.randn(2, 4),))
    marks = {"first": 0, "second": 1, "third": 1, "writer": 1}
    with pytest.raises(
        PartitionError, match=r"module first \(linear.* on partition 0 and module writer \(add, .* on partition 1"
    ):
        assign_manually(trace, marks, 0, num_ranks=2)


def test_joined_nodes_move_together():
    model, batch = Writes(), ((torch.randn(8, 4),), {})
    compilation = compiled(model, batch, {"first": 0, "second": 1, "writer": 0, "third": 0})
    assert ranks_of(compilation) == (0, 1, 0)
    assert_parity(model, batch, compilation)


class Whole(nn.Module):
    """Returns two tensors, of which its caller takes the first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x), x


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.leaf, self.after = nn.Linear(6, 6), mark_leaf(Whole()), nn.Linear(6, 6)

    def forward(self, x):
        h, rest = self.leaf(self.before(x))
        return self.after(h) + rest


def test_a_module_that_is_called_whole():
    model, batch = Holder(), ((torch.randn(8, 6),), {})
    compilation = compiled(model, batch, {"": 0, "leaf": 1})
    assert modules_of(compilation) == [("before",), ("leaf",), ("after",)]
    assert_parity(model, batch, compilation)
    with pytest.raises(PartitionError, match=r"module leaf on partition 0 is called whole.*leaf\.inner on 1"):
        compiled(model, batch, {"leaf.inner": 1})


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.unused(x)
        return self.used(x)


def test_an_empty_partition_is_named():
    trace = record(Unused(), (torch.randn(2, 4),))
    with pytest.raises(
        PartitionError, match=r"every one of 3 partitions .* nothing for partition 1, 2; .* on partitions 0:"
    ):
        assign_manually(trace, {"unused": 1}, 0, num_ranks=3)


def test_partitions_that_do_not_exist_are_named_together():
    trace = record(Children(), (torch.randn(2, 6),))
    with pytest.raises(ConfigError) as caught:
        assign_manually(trace, {"child0": 2, "child1": 1, "": 7}, 3, num_ranks=2)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "module child0",
        "module the model itself",
        "default_partition",
    ]
    assert "pipeline_parallel_degree - 1 = 1, found 2" in str(caught.value)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("seed", range(6))
def test_random_marks_run_like_one_process(seed):
    generator = torch.Generator().manual_seed(seed)
    model, batch = zoo.build("gpt2" if seed % 2 else "unet")
    marks = {
        name: int(torch.randint(3, (), generator=generator))
        for name, _ in model.named_modules()
        if torch.rand((), generator=generator) < 0.3
    }
    marks |= {name: i for i, name in enumerate(list(marks)[:3])}
    compilation = compiled(model, batch, marks, ranks=3, microbatches=2)
    assert_parity(model, batch, compilation)
