"""Distributed layers return what the layers of the transformers that is installed return; and all of it holds for other releases, too."""

import inspect

import hugging_face
import pytest
import releases
import torch

from smpc.nn import DistributedTransformerLayer
from smpc.nn.huggingface import families

HERE = "tests/unit/nn/test_nn_huggingface"


def returned(model, is_layer, arguments):
    """What each of its layers returns in a call."""
    found = []
    hooks = [m.register_forward_hook(lambda m, a, output: found.append(output)) for m in model.modules() if is_layer(m)]
    output = model(**arguments)
    for hook in hooks:
        hook.remove()
    return found, output


def is_theirs(module):
    return f"{type(module).__module__}.{type(module).__qualname__}" in families.FAMILIES


def same(found, expected, where):
    """Ours may end earlier, and has None for what distributed layers do not have: weights, and biases of cross-attention."""
    assert isinstance(found, tuple) == isinstance(expected, tuple), where
    if isinstance(found, tuple):
        while found and found[-1] is None:
            found = found[:-1]
        assert len(found) <= len(expected), where
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
            if ours is not None:
                same(ours, theirs, f"{where}[{index}]")
    elif isinstance(found, torch.Tensor):
        assert found.expand_as(expected).dtype == expected.dtype, where
    else:
        assert type(found) is type(expected), where


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", hugging_face.MODELS)
def test_layers_return_what_those_of_the_installed_release_return(name, use_cache):
    model, arguments = hugging_face.build(name), hugging_face.batch(name, 2)
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = use_cache
    [distributed] = hugging_face.split(model, 1)
    expected, output = returned(model, is_theirs, arguments)
    found, own_output = returned(distributed, lambda m: isinstance(m, DistributedTransformerLayer), arguments)
    assert len(found) == len(expected) > 0
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        same(ours, theirs, f"layer {index}")
    assert own_output.keys() == output.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", releases.NEEDS)
def test_all_of_it_holds_for_other_releases(release):
    paths = [f"{HERE}_{name}.py" for name in ("layers", "models", "releases")]
    printed = releases.run_tests(release, "-m", "not slow", *paths)
    assert " passed" in printed
    assert "skipped" not in printed
    told = releases.run_tests(release, "-s", f"{HERE}_releases.py::test_the_release_is_the_one_that_is_asked_for")
    assert f"transformers {release}" in told


def test_the_release_is_the_one_that_is_asked_for():
    """Prints it, for the test above."""
    print(f"transformers {hugging_face.transformers.__version__}")
    assert hugging_face.is_before_5() == (hugging_face.transformers.__version__ < "5")
