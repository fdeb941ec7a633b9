"""`smp.step` in one process, against the same microbatches in plain PyTorch."""

import copy
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smpc.v1 as smp
from smpc.errors import ConfigTypeError, StepError, UsageError
from smpc.v1.steps.model_calls import Tail

MB = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.fixture
def model():
    torch.manual_seed(0)
    smp.init({"pipeline_parallel_degree": 1, "microbatches": MB})
    yield smp.DistributedModel(Net())
    smp.shutdown()


def batch():
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss, len(x)


def test_training_equals_plain_pytorch(model):
    plain = copy.deepcopy(model.module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        losses, sizes = train_step(model, x, y=y)
        optimizer.step()
        reference.zero_grad()
        for m, (a, b) in enumerate(zip(x.chunk(MB), y.chunk(MB), strict=True)):
            loss = F.cross_entropy(plain(a), b)
            (loss / MB).backward()
            assert torch.equal(losses[m], loss.detach())
        reference.step()
        assert sizes == [2] * MB
        assert not losses[0].requires_grad
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_two_steps_accumulate(model):
    plain = copy.deepcopy(model.module)
    for _ in range(2):
        x, y = batch()
        train_step(model, x, y)
        for a, b in zip(x.chunk(MB), y.chunk(MB), strict=True):
            (F.cross_entropy(plain(a), b) / MB).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)


def test_gradients_of_outputs_and_sums_over_microbatches():
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})
    module = nn.Linear(3, 2)
    plain = copy.deepcopy(module)
    model = smp.DistributedModel(module, average_grads_across_microbatches=False)

    @smp.step(non_split_inputs=["weight"], input_split_axes={"x": 1})
    def step(model, x, weight):
        output = model(x.t())
        model.backward([output, output.sum()], [weight.expand_as(output), None])

    x, weight = torch.randn(3, 4), torch.randn(2)
    assert step(model, x, weight) is None
    for part in x.chunk(2, dim=1):
        output = plain(part.t())
        torch.autograd.backward([output, output.sum()], [weight.expand_as(output), torch.tensor(1.0)])
    assert torch.equal(module.weight.grad, plain.weight.grad)
    smp.shutdown()


def test_evaluation_leaves_no_gradients(model):
    @smp.step(detach_outputs=False)
    def evaluate(model, x):
        return model(x)

    x, _ = batch()
    model.eval()
    output = evaluate(model, x)
    assert output[0].requires_grad, "detach_outputs=False"
    assert torch.equal(output.concat(), torch.cat([model.module(part) for part in x.chunk(MB)]))
    with torch.no_grad():
        assert not evaluate(model, x)[0].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_arguments_of_every_kind(model):
    @smp.step(non_split_inputs=("whole",), input_split_axes={"turned": 1})
    def step(model, x, *more, whole, scale=2.0, **rest):
        model(x)
        return x.shape, more[0].shape, whole.shape, scale, rest["turned"].shape, rest["text"]

    x = torch.ones(8, 4)
    shapes = step(model, x, x, whole=x, turned=torch.ones(2, 12), text="t")
    assert shapes == (
        [torch.Size([2, 4])] * 4,
        [torch.Size([2, 4])] * 4,
        [torch.Size([8, 4])] * 4,
        [2.0] * 4,
        [torch.Size([2, 3])] * 4,
        ["t"] * 4,
    )


def test_it_does_not_bind_as_a_method(model):
    class Trainer:
        step = train_step

        def run(self, model, x, y):
            return self.step(model, x, y)

    assert len(Trainer().run(model, *batch())[0]) == MB
    assert train_step.__name__ == "train_step"
    assert repr(train_step) == "<smp.step test_v1_step.train_step>"


def test_misuse(model):
    x, y = batch()
    with pytest.raises(StepError, match=r"(?s)argument x: size 6 .*argument y: size 6 of axis 0"):
        train_step(model, x[:6], y[:6])
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        train_step(model, x)
    assert torch.equal(model(x), model.get_module()(x)), "there is no pipeline, so steps are not required"
    with pytest.raises(StepError, match=r"outside of steps.*does not depend on a parameter"):
        model.backward(x.sum())

    def check(function, message):
        with pytest.raises(StepError, match=message):
            smp.step(function)(model, x)

    check(lambda model, x: x, "without calling the model")
    check(lambda model, x: model(x) + model(x), "calls the model twice")
    check(lambda model, x: model.backward(model(x)), "has 6 elements")
    check(lambda model, x: model.backward(model(x).sum().detach()), "does not depend on a parameter")
    check(lambda model, x: model.backward(model(x), torch.ones(1)), "gradient 0 has shape")
    check(lambda model, x: model.backward([model(x)], []), "a gradient for each of 1 tensors, found 0")
    check(lambda model, x: model.backward(x.sum()), "before model")
    check(lambda model, x: train_step(model, x, x), "steps do not nest")
    train_step(model, x, y)

    def twice(model, x):
        loss = model(x).sum()
        model.backward(loss)
        model.backward(loss)

    check(twice, "backward twice")


def test_names_that_the_function_does_not_have():
    with pytest.raises(StepError, match=r"name the parameters model, x; found lable, axis"):
        smp.step(non_split_inputs=["lable"], input_split_axes={"axis": 1})(lambda model, x: None)
    with pytest.raises(ConfigTypeError, match="expected a function"):
        smp.step(3)


def test_a_step_needs_a_model():
    with pytest.raises(UsageError, match=r"call smp.init and smp.DistributedModel"):
        train_step(None, torch.ones(4, 4), None)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"non_split_inputs": "x"}, "non_split_inputs: expected a list of names, found 'x'"),
        ({"non_split_inputs": [3]}, "non_split_inputs: expected a list of names, found"),
        ({"non_split_inputs": 3}, "non_split_inputs: expected a list of names, found 3"),
        ({"input_split_axes": ["x"]}, "input_split_axes: expected a dict from name to axis"),
        ({"input_split_axes": {"x": "1"}}, "input_split_axes: expected an int as the axis of 'x', found '1'"),
        ({"input_split_axes": {"x": True}}, "input_split_axes: expected an int as the axis of 'x', found True"),
    ],
)
def test_options_of_the_wrong_type_are_refused_at_the_decorator(options, found):
    """A str was taken for the names of its letters: "x" worked, "mask" did not. A wrong axis failed in the middle of the first step."""
    with pytest.raises(StepError, match="step function") as caught:
        smp.step(**options)(lambda model, x: None)
    assert found in str(caught.value)


@pytest.mark.parametrize("loss", ["loss", None, 0.5, ["loss"]])
def test_backward_of_what_is_no_tensor(model, loss):
    """`model.backward(loss.item())` said "'float' object is not iterable"."""

    @smp.step
    def spoiled(model, x):
        model(x)
        model.backward(loss)

    with pytest.raises(StepError, match="expected tensors, found"):
        spoiled(model, batch()[0])


def test_loss_backward_in_a_pipeline_is_refused():
    """`loss.backward()`, left over from the script of one process, differentiated the last stage alone, and its gradients were not averaged
    over the microbatches, while the earlier stages' were. `torch.autograd.grad` down to the output itself stays possible."""
    layer = nn.Linear(3, 1)
    output = layer(torch.randn(4, 3))
    tail = Tail("train_step", {"logits": output}, 2, layer)
    logits = tail.forward((), {})["logits"]
    (gradient,) = torch.autograd.grad(logits.pow(2).sum(), logits)
    assert torch.equal(gradient, 2 * output.detach())
    with pytest.raises(StepError, match=r"call model.backward\(loss\)"):
        logits.sum().backward()
    assert layer.weight.grad is None
    loss = logits.mean()
    tail.backward(loss, None)
    tail.close()
    torch.autograd.backward(*zip(*tail.roots, strict=True))
    expected = torch.autograd.grad(layer(torch.ones(1, 3)).sum(), layer.bias)[0] / 2
    assert torch.equal(layer.bias.grad, expected)


def test_an_error_of_the_script_begins_with_its_line(model):
    @smp.step
    def step(model, x):
        raise KeyError("a mistake of mine")

    with pytest.raises(KeyError, match="a mistake of mine") as caught:
        step(model, torch.randn(8, 4))
    assert [frame.name for frame in traceback.extract_tb(caught.tb)] == [
        "test_an_error_of_the_script_begins_with_its_line",
        "step",
    ]
