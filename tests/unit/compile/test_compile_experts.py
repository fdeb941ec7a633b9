"""Plans of models whose experts are divided over ranks: what a rank holds, what it sends, and when it is refused."""

import pytest
import torch
import transformers
from expert_models import LENGTH, make, one_process, tokens
from tensor_ranks import run_ranks, tensor_groups
from torch import nn

import smpc
from smpc.codegen.rewrite.expert_parallel import describe_experts
from smpc.compile.options import PipelineOptions
from smpc.compile.replica_traffic import StepSurroundings
from smpc.compile.result import Traced
from smpc.compile.search.workloads import Workloads
from smpc.compile.step_breakdown import step_parts
from smpc.config.numbers import format_bytes
from smpc.errors import ConfigError, UsageError
from smpc.expert_parallel import shard
from smpc.experts import confirm_cut
from smpc.experts.find_experts import Stacked
from smpc.partitioner.costs.device import Device, Wire
from smpc.partitioner.costs.device_file import find_device
from smpc.runtime import LoopbackRuntime

ROWS, HIDDEN, CHOSEN = 2 * LENGTH, 32, 2


def compiled(name, **options):
    return smpc.compile_model(make(name, torch.float32), tokens(0), **{"pipeline_parallel_degree": 2, **options})


def expert_elements(name, count):
    """Of `count` experts of every layer, counted in the model itself."""
    model, total = make(name, torch.float32), 0
    for key, parameter in model.named_parameters():
        if ".experts." in key and parameter.dim() == 3:
            total += parameter[:count].numel()
        elif (".experts." in key and int(key.split(".experts.")[1].split(".")[0]) < count) or ".experts." not in key:
            total += parameter.numel()
    return total


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "degree", "most"), [("MixtralForCausalLM", 2, 2), ("Qwen3MoeForCausalLM", 2, 3), ("loop", 4, 1)]
)
def test_a_rank_holds_its_share_of_the_experts(name, degree, most):
    found = compiled(name, data_parallel_degree=degree, expert_parallel_degree=degree)
    assert sum(stage.num_parameters for stage in found.plan.stages) == expert_elements(name, most)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize("degree", [2, 4])
def test_rows_travel_there_and_back(degree):
    found = compiled("MixtralForCausalLM", data_parallel_degree=4, expert_parallel_degree=degree)
    sent = 2 * ROWS * CHOSEN * HIDDEN * 4 * (degree - 1) // degree
    assert [(item.forward_bytes, item.backward_bytes) for item in found.divided.collectives] == [(sent, sent)] * 2
    text = describe_experts(found.divided)
    assert f"{degree} ranks, {format_bytes(4 * sent)} sent" in text
    assert (
        f"model.layers.0.mlp.experts and 1 like it, to model.layers.1.mlp.experts: 4 experts, {format_bytes(sent)} forward"
        in text
    )


def test_rows_of_experts_in_a_list_are_told_by_their_work():
    found = compiled("loop", data_parallel_degree=2, expert_parallel_degree=2)
    sent = [item.forward_bytes for item in found.divided.collectives]
    whole = ROWS * CHOSEN * 16 * 4
    assert len(sent) == 2
    assert all(0.9 * whole < num_bytes < 1.1 * whole for num_bytes in sent)


@pytest.mark.long
def test_traffic_is_in_the_predicted_times():
    alone = compiled("MixtralForCausalLM", data_parallel_degree=2)
    divided = compiled("MixtralForCausalLM", data_parallel_degree=2, expert_parallel_degree=2)
    assert divided.plan.schedule.step_time > alone.plan.schedule.step_time
    options = PipelineOptions(pipeline_parallel_degree=2, data_parallel_degree=2, expert_parallel_degree=2)
    traced = Traced(divided.trace, divided=divided.divided)
    around = StepSurroundings.of(options)
    parts = step_parts(traced, divided.plan, divided.timeline(), around)
    assert parts.expert > 0
    waited = 1 + around.devices[0].slowdown(parts.devices)  # for the slowest of them
    assert parts.pipeline == pytest.approx(divided.timeline().makespan * waited)


@pytest.mark.long
def test_experts_are_divided_beside_weights_and_sequences():
    """A rank has half of the experts, and of these half of the inner dimension; of a slice of a sequence it sends half as much."""
    options = {"pipeline_parallel_degree": 1, "microbatches": 1, "expert_parallel_degree": 2}
    alone = compiled("MixtralForCausalLM", **options, data_parallel_degree=2)
    both = compiled("MixtralForCausalLM", **options, tensor_parallel_degree=2, context_parallel_degree=2)
    name = "model.layers.0.mlp.experts"
    shapes = {state.name.removeprefix(f"{name}."): state.spec.shape for state in both.trace.state if name in state.name}
    assert shapes == {"gate_up_proj": (2, 48, 32), "down_proj": (2, 32, 24)}
    call = next(node for node in both.trace.nodes if node.target == name)
    assert call.spec.num_elements == ROWS * HIDDEN // 2
    assert dict(call.kwargs) == {"num_sequence_slices": 2}
    assert both.divided.sent_bytes == alone.divided.sent_bytes // 2
    assert f"{format_bytes(both.divided.sent_bytes)} sent" in describe_experts(both.divided)
    traced = Traced(both.trace, both.sharded, context=both.context, divided=both.divided)
    around = StepSurroundings.of(PipelineOptions(**options, tensor_parallel_degree=2, context_parallel_degree=2))
    parts = step_parts(traced, both.plan, both.timeline(), around)
    assert min(parts.expert, parts.tensor, parts.context) > 0
    whole = compiled(
        "MixtralForCausalLM",
        **{**options, "expert_parallel_degree": 1},
        tensor_parallel_degree=2,
        context_parallel_degree=2,
    )
    assert not any(found.module.endswith("mlp.experts") for found in both.context.whole)
    assert any(found.module.endswith("mlp.experts") or "experts" in found.function for found in whole.context.whole)


@pytest.mark.parametrize(("replicas", "holders"), [(2, 1), (4, 2)])
def test_experts_are_divided_further_by_the_ranks_that_hold_the_same(replicas, holders):
    """Of what all replicas hold a rank has the whole in a step and one of `replicas` parts; of its experts one of `holders`,
    and the whole beside it even where that is all of them: FSDP gathers what one rank has, too."""
    options = {"data_parallel_degree": replicas, "expert_parallel_degree": 2, "fully_shard": True, "microbatches": 1}
    found = compiled("MixtralForCausalLM", **options, pipeline_parallel_degree=1)
    (stage,), held, state = found.plan.stages, 0, 0
    for key, parameter in make("MixtralForCausalLM", torch.float32).named_parameters():
        is_expert = ".experts." in key and parameter.dim() == 3
        rows, shards = (2, holders) if is_expert else (parameter.shape[0], replicas)
        num_bytes, part = 4 * parameter[:rows].numel(), 4 * parameter[: -(-rows // shards)].numel()
        held += part * (shards + 1)
        state += -(-2 * num_bytes // shards)
    assert (stage.parameter_bytes, stage.optimizer_bytes) == (held, state)


def test_a_plan_that_divides_experts_does_not_run():
    model = make("MixtralForCausalLM", torch.float32)
    found = smpc.compile_model(
        model, tokens(0), pipeline_parallel_degree=1, data_parallel_degree=2, expert_parallel_degree=2
    )
    with pytest.raises(UsageError, match=r"it is a plan; to run one, call smpc.expert_parallel.shard\(model, group\)"):
        LoopbackRuntime(model).install(found)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["sorted", "MixtralForCausalLM", "GptOssForCausalLM", "stack", "loop"])
def test_a_pipeline_of_parts(name):
    """Two pipeline ranks of each of two expert ranks: every microbatch's tokens travel inside of the stages."""
    groups, batches = tensor_groups(2), [tokens(0, 4), tokens(1, 4)]
    modules = [shard(make(name), group) for group in groups]
    options = {"pipeline_parallel_degree": 2, "microbatches": 2, "warn": False}
    found = [smpc.compile_model(own.model, batch, **options) for own, batch in zip(modules, batches, strict=True)]
    flops = [sum(stage.forward_flops for stage in compilation.plan.stages) for compilation in found]
    whole = smpc.compile_model(make(name), batches[0], **options)
    assert flops[0] == flops[1]
    if name != "stack":  # which has every expert compute every token
        assert flops[0] == pytest.approx(sum(stage.forward_flops for stage in whole.plan.stages), rel=0.2)

    def split(batch):
        return [{key: value[2 * i : 2 * i + 2] for key, value in batch.items()} for i in range(2)]

    def work(rank):
        runtime, losses = LoopbackRuntime(modules[rank].model), []
        program = runtime.install(found[rank])

        def take(_, output):
            losses.append(output["loss"].detach())
            return [(output["loss"] / 2, None)]

        runtime.run(program, [((), part) for part in split(batches[rank])], take, training=True)
        modules[rank].average_gradients()
        return sum(losses) / 2, modules[rank].whole_gradients()

    results = run_ranks(2, work)
    loss, gradients = one_process(make(name), [part for batch in batches for part in split(batch)])
    torch.testing.assert_close((results[0][0] + results[1][0]) / 2, loss, rtol=1e-11, atol=0)
    for _, own in results:
        assert own.keys() == gradients.keys()
        for key, expected in gradients.items():
            torch.testing.assert_close(own[key], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"data_parallel_degree": 3}, "expected a divisor of data_parallel_degree 3, .* found 2"),
        ({"data_parallel_degree": 1, "context_parallel_degree": 3}, "1 x context_parallel_degree 3, .* found 2"),
    ],
)
def test_what_does_not_go_together(options, match):
    with pytest.raises(ConfigError, match=match):
        compiled("loop", expert_parallel_degree=2, **options)


def test_a_model_without_experts():
    with pytest.raises(
        ConfigError, match=r"expert_parallel_degree: expected a model with experts .* no module looks like experts"
    ):
        smpc.compile_model(
            nn.Sequential(nn.Linear(4, 4)),
            torch.randn(2, 4),
            pipeline_parallel_degree=1,
            data_parallel_degree=2,
            expert_parallel_degree=2,
        )
    with pytest.raises(ConfigError, match="4 experts are fewer than 8 ranks"):
        compiled("MixtralForCausalLM", data_parallel_degree=8, expert_parallel_degree=8)


class Gathering(nn.Module):
    """Experts that take each token's weights by index: nothing of it depends on values, so it is recorded inside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 24, HIDDEN)), nn.Parameter(torch.randn(4, HIDDEN, 24))

    def forward(self, hidden, index, weights):
        rows = hidden.repeat_interleave(index.shape[1], 0).unsqueeze(-1)
        found = self.down[index.flatten()] @ (self.up[index.flatten()] @ rows).tanh()
        return (found.squeeze(-1) * weights.reshape(-1, 1)).view(*index.shape, -1).sum(1)


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.router, self.experts = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, 4), Gathering()

    def forward(self, ids):
        hidden = self.embedding(ids).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, weights).square().mean()


def test_experts_that_could_be_recorded_are_called_whole():
    """It was refused: their tokens travel inside of the call."""
    options = {"pipeline_parallel_degree": 1, "data_parallel_degree": 2, "expert_parallel_degree": 2}
    found = smpc.compile_model(Chosen(), {"ids": torch.zeros(4, 8, dtype=torch.long)}, **options)
    assert [node.target for node in found.trace.nodes if node.kind == "call_module"] == ["experts"]
    assert {state.name: state.spec.shape[0] for state in found.trace.state if "experts" in state.name} == {
        "experts.up": 2,
        "experts.down": 2,
    }


class Averaging(nn.Module):
    """It calls all its experts, and returns the loss."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4), nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, hidden):
        weights = self.router(hidden).softmax(-1)
        return sum(expert(hidden) * weights[:, i, None] for i, expert in enumerate(self.experts)).square().mean()


def test_experts_of_a_block_that_returns_the_loss_send_rows_of_their_own_width():
    """The loss has no last dimension: an IndexError."""
    options = {"pipeline_parallel_degree": 1, "data_parallel_degree": 2, "expert_parallel_degree": 2}
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Averaging())
    found = smpc.compile_model(model, torch.randn(8, HIDDEN), **options)
    (sent,) = (item.forward_bytes for item in found.divided.collectives)
    whole = 8 * 4 * HIDDEN * 4  # every row goes to all experts: half of the rows, there and back
    assert 0.9 * whole < sent < 1.2 * whole
    with pytest.raises(
        ConfigError, match="found that the model's own forward calls experts; put them and their router in"
    ):
        smpc.compile_model(Averaging(), torch.randn(8, HIDDEN), **options)


def test_weights_that_ranks_gather_are_kept_for_the_backward():
    """Autograd keeps the copy; it was taken to be the parameter, which is there anyway: ranks were predicted 9% too low."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 4, "num_local_experts": 4, "vocab_size": 64, "use_cache": False}
    config = transformers.MixtralConfig(**sizes, **more)
    model = transformers.MixtralForCausalLM(config).bfloat16()  # whose products of experts are recorded
    ids = torch.zeros(4, 64, dtype=torch.long)
    options = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "device": "cpu"}
    found = smpc.compile_model(model, {"input_ids": ids, "labels": ids}, **options)
    state = {node.name for node in found.trace.nodes if ".experts." in node.target}
    state |= {node.name for node in found.trace.nodes if state & set(node.inputs) and node.target.endswith("transpose")}
    gathered = [n for n in found.trace.nodes if n.target.endswith(".all_gather") and state & set(n.inputs)]
    saved = {storage for node in found.trace.nodes for storage in node.saved}
    assert gathered
    assert all(node.storage in saved for node in gathered)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"fully_shard": True}, pytest.param({"shard_optimizer_state": True}, marks=pytest.mark.slow)]
)
def test_ranks_that_share_sequences_count_as_replicas(options):
    """They hold the same parameters: `smpc compile -c 2` had no buckets, and nothing in parts."""
    shared, replicas = (
        smpc.compile_model(
            make("MixtralForCausalLM", torch.float32),
            tokens(0, 4),
            pipeline_parallel_degree=2,
            **{degree: 2},
            **options,
        ).plan.stages
        for degree in ("context_parallel_degree", "data_parallel_degree")
    )
    state = [[(stage.parameter_bytes, stage.optimizer_bytes) for stage in stages] for stages in (shared, replicas)]
    assert state[0] == state[1]


@pytest.mark.long
def test_gradients_of_experts_are_summed_over_the_ranks_that_have_the_same():
    """They were taken to be summed over all replicas, of which each has other experts; and so were the optimizer's buckets."""
    wire = Wire(1e6, 0.0)
    device = Device("d", {"float32": 1e15}, 1e9, 1, 8, wire, wire)
    chosen = {"device": device, "data_parallel_degree": 4, "expert_parallel_degree": 4}
    options = PipelineOptions(1, 1, **chosen)
    found = compiled("MixtralForCausalLM", pipeline_parallel_degree=1, microbatches=1, **chosen)
    (stage,) = found.plan.stages
    experts = sum(4 * state.spec.num_elements for state in found.trace.state if state.name in found.divided.parameters)
    others = stage.gradient_bytes - experts
    assert 0 < others < stage.gradient_bytes
    parts = step_parts(found.planned.traced, found.plan, found.timeline(), StepSurroundings.of(options))
    sent = 2 * others * 3 / 4
    assert parts.data == pytest.approx(sent / 1e6, rel=0.02)  # each rank alone has its experts
    state = 2 * stage.gradient_bytes  # Adam's
    assert parts.optimizer == pytest.approx((3 * stage.gradient_bytes + 2 * state) / 1e9)
    # In parts: on two ranks, the experts on those two that have the same
    options = {"data_parallel_degree": 4, "expert_parallel_degree": 2, "fully_shard": True, "device": device}
    found = compiled("MixtralForCausalLM", pipeline_parallel_degree=2, microbatches=2, **options)
    for stage in found.plan.stages:
        own = [state for state in found.trace.state if state.name in stage.parameters]
        experts = sum(4 * state.spec.num_elements for state in own if state.name in found.divided.parameters)
        others = sum(4 * state.spec.num_elements for state in own) - experts
        once = (others * 3 / 4 + experts / 2) / 1e6
        assert stage.exchange.first_forward == pytest.approx(once)
        assert stage.exchange.last_backward == pytest.approx(once)


class Scaled(nn.Module):
    """Experts with a number of their own, and of tokens that they drop."""

    def __init__(self, scale, dropped=0):
        super().__init__()
        self.scale, self.dropped, self.num_experts = scale, dropped, 4
        self.up, self.down = (nn.Parameter(torch.zeros(4, *shape)) for shape in ((HIDDEN, 24), (24, HIDDEN)))

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, slots = torch.where(index == expert)
            rows, slots = (rows[: len(rows) - self.dropped], slots[: len(rows) - self.dropped])
            done = torch.relu(hidden[rows] @ self.up[expert]) @ self.down[expert] * self.scale
            found = found.index_add(0, rows, done * weights[rows, slots, None])
        return found


def test_experts_that_are_made_alike_are_tried_once(monkeypatch):
    """Those of each layer were: 32 times two gigabytes of invented parameters for a Mixtral, most of the time of its plan."""
    tried, once = [], confirm_cut._tried_split

    def counted(experts, *others, **named):
        tried.append(experts.name)
        return once(experts, *others, **named)

    monkeypatch.setattr(confirm_cut, "_tried_split", counted)
    scales = (1.0, 1.0, 2.0, 1.0, 1.0)
    layers = [Scaled(scale, dropped=int(place == 3)) for place, scale in enumerate(scales)]
    layers[4].register_forward_hook(lambda *_: None)
    confirmations = confirm_cut.Confirmations()
    found = [Stacked(str(i), layer, 4, ("up", "down")) for i, layer in enumerate(layers)]
    results = [confirmations.of(one) for one in found]
    assert tried[0] == "0"
    assert "1" not in tried
    assert {"2", "3", "4"} <= set(tried)
    assert isinstance(results[3], str)  # it drops tokens
    for one, result in zip(found, results, strict=True):
        alone = confirm_cut.confirm(one)
        assert result == alone
        assert isinstance(result, str) or result.experts is one


class Viewed(Scaled):
    """Reads its weights as one matrix of all experts' rows, which tensors that share memory do not allow."""

    def forward(self, hidden, index, weights):
        found, up = torch.zeros_like(hidden), self.up.view(-1, 24)
        for expert, own in enumerate(up.split(HIDDEN)):
            rows, slots = torch.where(index == expert)
            found = found.index_add(0, rows, hidden[rows] @ own @ self.down[expert] * weights[rows, slots, None])
        return found


class Mixing(Scaled):
    """Adds the first expert's weights to those of all others."""

    def forward(self, hidden, index, weights):
        return super().forward(hidden + self.up[0].sum(), index, weights)


class Counting(Scaled):
    """Cannot run unless it has as many experts as it says, as products in groups."""

    def forward(self, hidden, index, weights):
        if len(self.up) != self.num_experts:
            raise ValueError("matrix batch sizes have to match")
        return super().forward(hidden, index, weights)


def test_large_experts_get_memory_of_their_own_where_none_share_it(monkeypatch):
    """Each try that failed, with another count or width, was made again so: 6.4 GB for a Mixtral 8x22B."""
    experts = Counting(1.5)
    experts.num_experts, experts.up, experts.down = (
        8,
        *(nn.Parameter(each.repeat(2, 1, 1)) for each in (experts.up, experts.down)),
    )
    monkeypatch.setattr(confirm_cut, "_LARGE", 0)
    made, once = [], confirm_cut.invented_parameters

    def noted(*given, apart=False):
        made.append(apart)
        return once(*given, apart=apart)

    monkeypatch.setattr(confirm_cut, "invented_parameters", noted)
    found = confirm_cut.confirm(Stacked("", experts, 8, ("up", "down")))
    assert (found.counts, found.hidden) == (("num_experts",), HIDDEN)
    assert made
    assert True not in made


@pytest.mark.parametrize("make_experts", [Scaled, Viewed, Mixing, lambda scale: Scaled(scale, dropped=1)])
def test_large_experts_share_memory_and_are_judged_alike(make_experts, monkeypatch):
    """Mixtral's took 5.9 GB of invented parameters, whose pages alone took half of the time."""
    experts = Stacked("", make_experts(1.5), 4, ("up", "down"))
    expected = confirm_cut.confirm(experts)
    monkeypatch.setattr(confirm_cut, "_LARGE", 0)
    assert confirm_cut.confirm(experts) == expected
    up, down = confirm_cut.invented_parameters(experts, 4, torch.Generator())
    assert up.untyped_storage().nbytes() == 4 * (HIDDEN * 24 + 3 * 4100)
    assert not torch.equal(up[0], up[1])
    assert down[1, 0, 0] == down.storage_offset() + down.as_strided((1,), (1,), 4100)[0]


def test_experts_are_tried_once_for_all_degrees(monkeypatch):
    tried, once = [], confirm_cut._tried_split

    def counted(experts, *others, **options):
        tried.append(experts.name)
        return once(experts, *others, **options)

    monkeypatch.setattr(confirm_cut, "_tried_split", counted)
    ids = tokens(0)["input_ids"]
    found = Workloads(make("MixtralForCausalLM", torch.float32), ((ids,), {}), find_device("cpu"), ())
    assert [len(found.divided(degree)) for degree in (2, 4)] == [2, 2]
    assert tried == ["model.layers.0.mlp.experts"]


def test_unwritten_memory_is_no_token():
    """Grouped products leave rows that no expert gets unwritten: a Mixtral was refused now and then, as memory happened to be."""
    rows, ends = torch.randn(4, 16), torch.tensor([1, 2], dtype=torch.int32)
    with confirm_cut._unwritten_is_nan():
        found = nn.functional.grouped_mm(rows, torch.zeros(2, 16, 16), offs=ends)
    assert found[:2].eq(0).all()
    assert found[2:].isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
