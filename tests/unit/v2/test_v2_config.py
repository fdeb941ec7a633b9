"""The configuration of SMP v2: which degrees fit which worlds, and what is said of those that do not."""

import itertools
import json
import re

import pytest
import torch.distributed as dist

import smpc.v2 as tsm
from smpc.errors import ConfigError, ConfigTypeError
from smpc.v2.session.config import SessionConfig

DEGREES = ("hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


def possible(world):
    """Every tuple of degrees that some arrangement of the ranks has, made from arrangements and not from the rules.

    A shard group is a rectangle of sequences (shard / context) by context ranks; its experts are another rectangle of the same ranks.
    """
    found = set()
    for replicas, sequences, context, tensor in itertools.product(range(1, world + 1), repeat=4):
        if replicas * sequences * context * tensor != world:
            continue
        shard = sequences * context
        for outer, expert in itertools.product(range(1, shard + 1), repeat=2):
            if outer * expert == shard:
                found.add((shard, tensor, context, expert))
                if replicas == 1:
                    found.add((0, tensor, context, expert))
    return found


def refusal(given):
    """What `tsm.init` says of a configuration; None if it is accepted."""
    try:
        tsm.init(given)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "world", [*range(1, 9), *(pytest.param(world, marks=pytest.mark.slow) for world in range(9, 17))]
)
def test_exactly_the_degrees_that_can_be_arranged_are_accepted(world, monkeypatch):
    """The others are one error of `tsm.init`, in which every line names a degree, before anything is started."""
    for name in ("init_process_group", "new_group", "all_gather_object"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: pytest.fail("something was started"))
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    good, line = possible(world), re.compile(f"({'|'.join(DEGREES)}): expected .+")
    too_large = [tuple(world + 1 if each is one else int(each > 0) for each in range(4)) for one in range(4)]
    for degrees in (*itertools.product(range(world + 1), *[range(1, world + 1)] * 3), *too_large):
        given = dict(zip(DEGREES, degrees, strict=True))
        if degrees not in good:
            said = refusal(given)
            assert said is not None, given
            assert all(map(line.fullmatch, said.splitlines())), (given, said)
            continue
        config = SessionConfig.parse(given, world)
        assert world % (config.shard_degree(world) * degrees[1]) == 0
        assert config.is_native == (degrees[0] < 2 and degrees[1:] == (1, 1, 1))


def test_defaults_are_those_of_the_reference():
    assert SessionConfig.parse(None, 1) == SessionConfig(
        hybrid_shard_degree=0,
        sm_activation_offloading=True,
        activation_loading_horizon=2,
        fsdp_cache_flush_warnings=True,
        allow_empty_shards=False,
        tensor_parallel_degree=1,
        context_parallel_degree=1,
        expert_parallel_degree=1,
        random_seed=12345,
    )


def test_all_violations_come_in_one_error():
    wrong = {"tensor_parallel_degre": 2, "activation_loading_horizon": 0, "random_seed": "1", "hybrid_shard_degree": 5}
    with pytest.raises(ConfigTypeError) as caught:
        SessionConfig.parse(wrong, 8)
    lines = str(caught.value).splitlines()
    assert lines == [
        "random_seed: expected int, found str '1' (config)",
        "Unrecognized config parameter tensor_parallel_degre; did you mean tensor_parallel_degree? (config)",
        "activation_loading_horizon: expected at least 1, found 0 (config)",
        "hybrid_shard_degree: expected 0 or a divisor of 8 (8 processes / tensor_parallel_degree 1), found 5; "
        "use one of 0, 1, 2, 4, 8, or start a multiple of 5 processes",
    ]


def test_degrees_that_do_not_fit_say_what_would():
    with pytest.raises(ConfigError) as caught:
        SessionConfig.parse({"tensor_parallel_degree": 2, "context_parallel_degree": 8}, 8)
    assert str(caught.value) == (
        "context_parallel_degree: expected at most 4 (hybrid_shard_degree 0, which is 4 here), found 8; use one of 1, 2, 4, or another "
        "hybrid_shard_degree"
    )


@pytest.mark.parametrize("form", ["dict", "text", "file", "nested", "environment"])
def test_each_source(form, tmp_path):
    given = {"hybrid_shard_degree": 2, "sm_activation_offloading": 0}
    nested = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": given}},
        "torch_distributed": {"enabled": True},
    }
    path = tmp_path / "smp.json"
    path.write_text(json.dumps(given))
    source, environ = {
        "dict": (given, None),
        "text": (json.dumps(given), None),
        "file": (path, None),
        "nested": (nested, None),
        "environment": (None, {"SM_HP_MP_PARAMETERS": json.dumps(given)}),
    }[form]
    config = SessionConfig.parse(source, 4, environ)
    assert (config.hybrid_shard_degree, config.sm_activation_offloading) == (2, False)


def test_the_environment_overrides_key_by_key():
    environ = {"SM_HP_MP_PARAMETERS": '{"hybrid_shard_degree": 4}'}
    config = SessionConfig.parse({"hybrid_shard_degree": 2, "random_seed": 7}, 4, environ)
    assert (config.hybrid_shard_degree, config.random_seed) == (4, 7)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/nowhere/smp.json", "cannot read it"),
        ("smp.yaml", "expected a .json or .toml file"),
        ('{"hybrid_shard_degree": }', "malformed JSON"),
        ([1], "expected a dict, the text of a JSON object, or the path of a .json file, found list"),
    ],
)
def test_what_is_no_source_says_so(source, said):
    with pytest.raises(ConfigError, match=said):
        SessionConfig.parse(source, 1)


def test_settings_without_effect_are_told():
    assert list(SessionConfig().ignored()) == []
    (line,) = SessionConfig.parse({"allow_empty_shards": True}, 1).ignored()
    assert line.startswith("allow_empty_shards: True has no effect here")
