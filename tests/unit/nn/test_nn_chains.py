"""Hidden states stay inside between the layers of a stack: tensors between them, messages, and tensors kept for backward."""

import warnings

import hugging_face
import pytest
import torch
import transformers
from tensor_ranks import run_ranks, tensor_groups
from torch.utils._python_dispatch import TorchDispatchMode

from smpc.nn.distribution.distribute import distribute, set_tensor_parallelism
from smpc.nn.distribution.registry import Registry
from smpc.nn.parallel import TensorParallel
from smpc.nn.transformer.transformer import DistributedTransformerLayer

TP = 2
FAMILIES = ["gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta", "t5", "vit"]


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, DistributedTransformerLayer)]


def nodes_of(loss):
    """The names of the nodes of a graph."""
    found, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(node.name())
            todo += [following for following, _ in node.next_functions]
    return found


def unlinked(model):
    """Every layer on its own."""
    for layer in layers_of(model):
        layer.takes_inside = layer.returns_inside = False
    return model


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("optimize", "prescaled"), [("memory", False), ("memory", True), ("speed", False)])
def test_between_layers_hidden_states_are_inside(name, optimize, prescaled):
    """[tp * B, S, H / tp] or [tp * B, S, H]; one entry and one exit a stack, where there were as many as layers; masks enter once."""
    ranks = hugging_face.split(hugging_face.build(name), TP, optimize, prescaled)
    stacks, batch = (2 if name == "t5" else 1), hugging_face.BATCH * TP
    arguments = hugging_face.batch(name, batch)
    arguments.pop("use_cache", None)

    def run(rank):
        shapes, inputs = [], {k: v if prescaled else v.chunk(TP)[rank] for k, v in arguments.items()}
        model = ranks[rank]
        for layer in layers_of(model):
            hook = lambda _, args, output: shapes.append((output[0] if isinstance(output, tuple) else output).shape)  # noqa: E731
            layer.register_forward_hook(hook)
        linked = nodes_of(model(**inputs).loss)
        found = shapes[:]
        return found, linked, nodes_of(unlinked(model)(**inputs).loss)

    hidden = hugging_face.HIDDEN
    for shapes, linked, alone in run_ranks(TP, run):
        assert len(shapes) == 2 * stacks
        inside = [shapes[i] for i in range(0, len(shapes), 2)]
        outside = [shapes[i] for i in range(1, len(shapes), 2)]
        assert {(s[0], s[2]) for s in inside} == {(batch, hidden // TP if optimize == "memory" else hidden)}
        assert {(s[0], s[2]) for s in outside} == {(batch if prescaled else batch // TP, hidden)}
        saved = alone.count("_LinearMapBackward") - linked.count("_LinearMapBackward")
        crossing = 1 if name == "t5" else 0  # cross states enter with the first layer alone
        assert saved == 2 * stacks + crossing
        assert linked.count("_ProductsBackward") == alone.count("_ProductsBackward")


def test_layers_apart_are_not_linked():
    """One that stays whole, one that occurs twice, and stacks of other classes."""

    class Own(transformers.GPT2Model):
        """Perhaps it does something between layers."""

    def flags(model, **changes):
        set_tensor_parallelism(model.h)
        for layer in changes.get("whole", ()):
            set_tensor_parallelism(model.h[layer], False)
        found = distribute(model, Registry(), TensorParallel())
        return [
            (layer.takes_inside, layer.returns_inside) if isinstance(layer, DistributedTransformerLayer) else None
            for layer in found.h
        ]

    sizes = {
        "n_layer": 4,
        "n_embd": 16,
        "n_head": 2,
        "n_positions": 8,
        "vocab_size": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**sizes)
    first, inner, last, alone = (False, True), (True, True), (True, False), (False, False)
    assert flags(transformers.GPT2Model(config)) == [first, inner, inner, last]
    assert flags(transformers.GPT2Model(config), whole=[1]) == [alone, None, first, last]
    assert flags(Own(config)) == [alone] * 4
    again = transformers.GPT2Model(config)
    again.h[3] = again.h[1]
    assert flags(again) == [alone] * 4


class Sent(TorchDispatchMode):
    """Bytes of every collective whose tensors are larger than what goes through shared memory."""

    def __init__(self, least):
        super().__init__()
        self.least, self.sizes = least, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            if size > self.least:
                self.sizes.setdefault(func.overloadpacket.__name__, []).append(size)
        return func(*args, **(kwargs or {}))


LAYERS, WIDTH, LENGTH, BATCH = 3, 256, 1024, 2  # so large that nothing of them goes through shared memory
STATE = 4 * TP * BATCH * LENGTH * WIDTH  # bytes of a whole hidden state of the scaled batch


def big(size, optimize="memory", prescaled=False):
    """A stack of GPT-2 whose layers alone are distributed, on every rank."""
    sizes = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": 4,
        "n_positions": LENGTH,
        "vocab_size": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    found = []
    for group in tensor_groups(size):
        torch.manual_seed(1)
        model = transformers.GPT2Model(transformers.GPT2Config(**sizes, **dropouts))
        set_tensor_parallelism(model.h)
        with warnings.catch_warnings():
            found.append(distribute(model, Registry(), TensorParallel(group, optimize, prescaled)))
    return found


def test_what_is_sent_is_what_the_layers_need():
    """memory: a gather and a reduce-scatter for attention and output layer each; backward the same, and both gathers once more."""
    ranks = big(TP)
    states = torch.randn(TP * BATCH, LENGTH, WIDTH)

    def run(rank):
        with Sent(STATE // TP // TP - 1) as forward:
            output = ranks[rank](inputs_embeds=states.chunk(TP)[rank], use_cache=False).last_hidden_state
        with Sent(STATE // TP // TP - 1) as backward:
            output.sum().backward()
        return forward.sizes, backward.sizes

    for forward, backward in run_ranks(TP, run):
        own = [STATE // TP] * 2
        assert forward == {
            "_allgather_base_": [STATE] * 2 * LAYERS,
            "_reduce_scatter_base_": [STATE] * 2 * LAYERS,
            "alltoall_base_": own,
        }
        assert backward == {
            "_allgather_base_": [STATE] * 4 * LAYERS,
            "_reduce_scatter_base_": [STATE] * 2 * LAYERS,
            "alltoall_base_": own,
        }


def kept_by(model, states):
    """Bytes that are kept for the backward pass, of storages of its own."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = states
        for layer in model.h:
            hidden = layer(hidden)
    hidden.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("prescaled", [False, True])
def test_with_memory_no_activation_is_kept_twice(prescaled):
    """All that a rank keeps is its share; with speed, hidden states are kept by all."""
    states = torch.randn(TP * BATCH, LENGTH // 8, WIDTH)
    (alone,) = big(1)
    whole = kept_by(alone, states)

    def share(optimize):
        ranks = big(TP, optimize, prescaled)
        own = [states, states] if prescaled else states.chunk(TP)
        return max(run_ranks(TP, lambda rank: kept_by(ranks[rank], own[rank]))) / whole

    memory, speed = share("memory"), share("speed")
    print(f"kept by a rank of {TP}: {memory:.3f} of the whole with memory, {speed:.3f} with speed")
    assert memory == pytest.approx(1 / TP, rel=0.02)
    assert speed > memory * 1.2
