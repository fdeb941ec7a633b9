"""`smpc.config`: the keys of the reference, their rules, and what every kind of mistake says."""

import dataclasses
import json
import pickle
import re

import pytest

from smpc.config import KEYS, Config, read_file
from smpc.errors import ConfigError, ConfigTypeError, ConfigUnsupportedError

# Copied by hand from the public configuration reference: name, type, default with 2 partitions and 8 microbatches.
REFERENCE = [
    ("pipeline_parallel_degree", int, 2),
    ("microbatches", int, 8),
    ("pipeline", str, "interleaved"),
    ("optimize", str, "memory"),
    ("placement_strategy", str, "cluster"),
    ("auto_partition", bool, True),
    ("default_partition", int, 0),
    ("contiguous", bool, True),
    ("horovod", bool, False),
    ("memory_weight", float, 0.8),
    ("ddp", bool, False),
    ("active_microbatches", int, 4),
    ("deterministic_server", bool, False),
    ("offload_activations", bool, False),
    ("activation_loading_horizon", int, 4),
    ("tensor_parallel_degree", int, 1),
    ("fp16_params", bool, False),
    ("shard_optimizer_state", bool, False),
    ("prescaled_batch", bool, False),
    ("skip_tracing", bool, False),
]
LATER = {
    "horovod": True,
}
SHARDED = {
    "sdp_reduce_bucket_size": 7,
    "sdp_param_persistence_threshold": 7,
    "sdp_max_live_parameters": 7,
    "sdp_hierarchical_allgather": False,
    "sdp_gradient_clipping": 0.5,
}
NO_EFFECT = {
    "checkpoint_attentions": True,
    "contiguous": False,
    "deterministic_server": True,
    "load_partition": True,
    "partition_file": "plan.pt",
    "ddp_port": 1234,
    "static_mode": True,
    "fast_mode": True,
    "_match_weights": True,
}


def error(parameters, expected=ConfigError, **sources):
    with pytest.raises(expected) as caught:
        Config.parse(parameters, **sources)
    assert type(caught.value) is expected
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("name", "kind", "default"), REFERENCE)
def test_keys_and_defaults_of_the_reference(name, kind, default):
    value = getattr(Config.parse({"pipeline_parallel_degree": 2, "microbatches": 8}), name)
    assert value == default
    assert type(value) is kind


def test_the_default_of_microbatches_is_one():
    assert Config.parse({"partitions": 2}).microbatches == 1


def test_every_key_has_a_meaning_and_at_most_one_way_of_being_refused():
    for key in KEYS.values():
        assert key.meaning
        assert not (key.unsupported and key.no_effect)


@pytest.mark.parametrize(
    ("given", "microbatches", "resolved"),
    [(None, 1, 1), (None, 3, 3), (None, 4, 4), (None, 8, 4), (1, 8, 1), (6, 8, 6), (6, 3, 3)],
)
def test_active_microbatches_defaults_to_two_more_than_stages_and_never_exceeds_microbatches(
    given, microbatches, resolved
):
    parameters = {"partitions": 2, "microbatches": microbatches, "active_microbatches": given}
    assert Config.parse(parameters).active_microbatches == resolved


def test_memory_weight_follows_optimize_unless_given():
    assert Config.parse({"partitions": 1, "optimize": "speed"}).memory_weight == 0.2
    assert Config.parse({"partitions": 1, "optimize": "memory"}).memory_weight == 0.8
    weight = Config.parse({"partitions": 1, "optimize": "speed", "memory_weight": 1}).memory_weight
    assert weight == 1.0
    assert type(weight) is float


def test_partitions_is_an_alias():
    assert Config.parse({"partitions": 3}) == Config.parse({"pipeline_parallel_degree": 3})
    assert Config.parse({"partitions": 3, "pipeline_parallel_degree": 3}).pipeline_parallel_degree == 3
    [line] = error({"partitions": 3, "pipeline_parallel_degree": 4})
    assert "partitions = 3 and pipeline_parallel_degree = 4" in line


def test_without_a_degree_there_is_no_pipeline():
    assert Config.parse({"microbatches": 2}).pipeline_parallel_degree == 1
    assert Config.parse({}) == Config.parse({"partitions": 1}) == Config()


@pytest.mark.parametrize("name", [name for name, kind, _ in REFERENCE if kind is bool and name != "horovod"])
def test_booleans_may_be_zero_and_one(name):
    parameters = {"partitions": 1, "default_partition": 0, "ddp": 1}
    for number in (0, 1):
        config = Config.parse({**parameters, name: number}, warn=False)
        assert getattr(config, name) is bool(number)
        assert Config(**{"default_partition": 0, "ddp": True, name: number}) == config
    [line] = error({**parameters, name: 2}, ConfigTypeError)
    assert line == f"{name}: expected bool, found int 2 (config)"


def test_the_older_name_of_prescaled_batch_changes_results_as_the_newer_one_does():
    assert Config.parse({"_prescaled_batch": 1}).prescaled_batch is True
    [line] = error({"_prescaled_batch": 1, "prescaled_batch": 0})
    assert line.startswith("prescaled_batch: _prescaled_batch = True and prescaled_batch = False")


def test_without_sharding_what_is_said_of_it_may_be_anything_and_is_named_in_one_warning():
    anything = {**SHARDED, "sdp_gradient_clipping": None, "sdp_reduce_bucket_size": "auto"}
    with pytest.warns(UserWarning, match="has no effect here: it is for sharded_data_parallel_degree") as caught:
        config = Config.parse({"sharded_data_parallel_degree": 1, "static_mode": 1, **anything})
    assert [line.split(":")[0] for line in str(caught[0].message).splitlines()] == ["static_mode", *anything]
    assert len(caught) == 1
    assert config.sdp_gradient_clipping == 1.0


def test_how_long_blocks_stay_whole_counts_with_fully_shard():
    with pytest.warns(UserWarning, match="sdp_gradient_clipping: 0.5 has no effect here") as caught:
        config = Config.parse({"fully_shard": True, "ddp": True, **SHARDED})
    assert "sdp_max_live" not in str(caught[0].message)
    assert "sdp_param" not in str(caught[0].message)
    assert (config.sdp_max_live_parameters, config.sdp_gradient_clipping) == (7, 1.0)


def test_with_sharding_it_counts_but_for_buckets_and_the_order_of_hosts():
    with pytest.warns(
        UserWarning, match="sdp_reduce_bucket_size: 7 has no effect here: the gradients of a block"
    ) as caught:
        config = Config.parse({"sharded_data_parallel_degree": 2, "ddp": True, **SHARDED})
    unused = ["sdp_reduce_bucket_size", "sdp_hierarchical_allgather"]
    assert [line.split(":")[0] for line in str(caught[0].message).splitlines()] == unused
    assert config.sdp_gradient_clipping == 0.5
    lines = error({"sharded_data_parallel_degree": 2, "fully_shard": True, "shard_optimizer_state": True})
    assert lines[-4:] == [
        "fully_shard: true requires ddp: true, found ddp: false",
        "fully_shard: true and shard_optimizer_state: true exclude each other; keep one",
        "sharded_data_parallel_degree: 2 requires ddp: true, found ddp: false",
        "sharded_data_parallel_degree: 2 and shard_optimizer_state: true exclude each other; keep one",
    ]


@pytest.mark.parametrize(
    ("wrong", "closest"),
    [
        ("microbatch", "microbatches"),
        ("pipeline_paralel_degree", "pipeline_parallel_degree"),
        ("partition", "partitions"),
    ],
)
def test_an_unknown_key_names_the_closest(wrong, closest):
    [line] = error({"pipeline_parallel_degree": 1, wrong: 1})
    assert line.startswith(f"Unrecognized config parameter {wrong}; did you mean {closest}?")


def test_an_unknown_key_that_resembles_none_suggests_none():
    [line] = error({"pipeline_parallel_degree": 1, "zzzz": 1})
    assert line == "Unrecognized config parameter zzzz (config)"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("microbatches", True, "expected int, found bool True"),
        ("microbatches", 2.0, "expected int, found float 2.0"),
        ("microbatches", "2", "expected int, found str '2'"),
        ("microbatches", None, "expected int, found NoneType None"),
        ("ddp", 2, "expected bool, found int 2"),
        ("memory_weight", False, "expected float, found bool False"),
        ("pipeline", ["simple"], "expected str, found list ['simple']"),
    ],
)
def test_a_wrong_type_names_key_expected_and_found(key, value, text):
    [line] = error({"partitions": 2, key: value}, ConfigTypeError)
    assert line == f"{key}: {text} (config)"


def test_a_wrong_type_is_both_a_type_error_and_a_value_error():
    assert issubclass(ConfigTypeError, TypeError)
    assert issubclass(ConfigTypeError, ValueError)
    assert issubclass(ConfigUnsupportedError, NotImplementedError)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("partitions", 0, "pipeline_parallel_degree: expected at least 1, found 0"),
        ("microbatches", -1, "microbatches: expected at least 1, found -1"),
        ("memory_weight", 1.5, "memory_weight: expected from 0.0 to 1.0, found 1.5"),
        ("memory_weight", float("nan"), "memory_weight: expected from 0.0 to 1.0, found nan"),
        ("active_microbatches", 0, "active_microbatches: expected at least 1, found 0"),
        ("ddp_port", 65536, "ddp_port: expected from 0 to 65535, found 65536"),
        ("pipeline", "1f1b", "pipeline: expected one of interleaved, simple, found '1f1b'"),
        ("optimize", "", "optimize: expected one of memory, speed, found ''"),
        (
            "placement_strategy",
            "DPP",
            "placement_strategy: expected one of cluster, spread, PDT, PTD, DPT, DTP, TPD, TDP, found 'DPP'",
        ),
        ("default_partition", 2, "default_partition: expected at most pipeline_parallel_degree - 1 = 1, found 2"),
        ("auto_partition", False, "auto_partition: false requires default_partition"),
        ("tensor_parallel_degree", 2, "tensor_parallel_degree: 2 requires ddp: true"),
    ],
)
def test_bounds_options_and_dependencies(key, value, text):
    [line] = error({"partitions": 2, key: value} if key != "partitions" else {key: value})
    assert line.startswith(text)


def test_by_hand_a_rank_has_the_pieces_that_it_is_given():
    parameters = {"partitions": 2, "auto_partition": False, "default_partition": 1}
    config = Config.parse(parameters)
    assert (config.auto_partition, config.default_partition) == (False, 1)
    [line] = error({**parameters, "virtual_pipeline_degree": 2})
    assert line.startswith("virtual_pipeline_degree: 2 requires auto_partition: true")


def test_all_violations_are_reported_together():
    lines = error(
        {
            "partitions": 2,
            "pipelin": "simple",
            "microbatches": 0,
            "optimize": "both",
            "default_partition": 5,
            "tensor_parallel_degree": 2,
        }
    )
    starts = ["Unrecognized config parameter pipelin", "microbatches", "optimize", "tensor_parallel_degree"]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=False)] == [True] * 4
    assert lines[4].startswith("default_partition")
    assert len(lines) == 5
    lines = error({"partitions": "2", "microbatches": 0, "ddp": "yes"}, ConfigTypeError)
    assert [line.split(":")[0] for line in lines] == ["pipeline_parallel_degree", "ddp", "microbatches"]


def test_ranks_that_share_sequences_need_ddp_and_the_compiler_s_plan():
    assert error({"context_parallel_degree": 2}) == ["context_parallel_degree: 2 requires ddp: true, found ddp: false"]
    both = {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    for plan in ({}, {"tensor_parallel_plan": "modules"}, {"tensor_parallel_plan": "huggingface"}):
        [line] = error({**both, **plan})
        found = plan.get("tensor_parallel_plan", "modules")
        assert line.startswith(
            "context_parallel_degree: 2 beside tensor_parallel_degree: 2 requires tensor_parallel_plan: auto"
        )
        assert f"found {found}" in line
    assert Config.parse({**both, "tensor_parallel_plan": "auto"}).context_parallel_degree == 2
    assert Config.parse({"context_parallel_degree": 2, "ddp": True, "tensor_parallel_outputs": "loss"})


def test_precisions_exclude_each_other_and_sharding_needs_replicas():
    lines = error({"partitions": 2, "fp16": True, "bf16": True, "fp16_params": True, "shard_optimizer_state": True})
    assert lines == [
        "shard_optimizer_state: true requires ddp: true, found ddp: false",
        "fp16: true and bf16: true exclude each other; keep one",
        "fp16_params: true and bf16: true exclude each other; keep one",
    ]
    assert Config.parse({"partitions": 2, "fp16": True, "fp16_params": True, "ddp": True}).fp16_params


@pytest.mark.parametrize("key", LATER)
def test_a_feature_of_later_raises_not_implemented(key):
    parameters = {"partitions": 2, "ddp": True, "default_partition": 0, key: LATER[key]}
    [line] = error(parameters, ConfigUnsupportedError)
    assert line.startswith(f"{key}: {LATER[key]!r} is not implemented yet; ")
    with pytest.raises(NotImplementedError):
        Config.parse(parameters)


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_effect_warns_and_says_why(key):
    with pytest.warns(UserWarning, match=f"^{key}: .* has no effect here: ..") as caught:
        config = Config.parse({"partitions": 2, key: NO_EFFECT[key]})
    assert len(caught) == 1
    assert getattr(config, key) == NO_EFFECT[key]
    assert Config.parse({"partitions": 2, key: NO_EFFECT[key]}, warn=False) == config


def test_fp32_gradients_are_for_half_precision():
    for precision in ("fp16", "bf16"):
        assert Config.parse({"partitions": 1, "_fp32_grad_accumulation": True, precision: True})._fp32_grad_accumulation
    with pytest.warns(
        UserWarning, match="_fp32_grad_accumulation: True has no effect here: it is for fp16: true and bf"
    ):
        Config.parse({"partitions": 1, "_fp32_grad_accumulation": True})


@pytest.mark.parametrize("value", ["yes", 2, None, "true", 1.0])
def test_verify_is_a_bool(value):
    with pytest.raises(ConfigTypeError, match="verify: expected bool, found "):
        Config.parse({"partitions": 2, "verify": value})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"partitions": 1}, "verify: True has no effect here: without a pipeline the module itself is run"),
        (
            {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True},
            "verify: True has no effect here: the ranks of a tensor",
        ),
        (
            {"partitions": 2, "context_parallel_degree": 2, "ddp": True},
            "verify: True has no effect here: the ranks of a context",
        ),
    ],
)
def test_verify_where_it_can_do_nothing_is_said(more, says):
    with pytest.warns(UserWarning, match=says):
        Config.parse({"verify": True, **more})


def test_every_key_that_is_neither_used_nor_refused_nor_warned_about_is_known():
    quiet = {name for name, key in KEYS.items() if not key.unsupported and not key.no_effect}
    assert quiet == {
        "delayed_parameter_initialization",
        "pipeline_parallel_degree",
        "microbatches",
        "offload_activations",
        "activation_loading_horizon",
        "pipeline",
        "optimize",
        "placement_strategy",
        "auto_partition",
        "default_partition",
        "memory_weight",
        "ddp",
        "fully_shard",
        "tensor_parallel_plan",
        "tensor_parallel_outputs",
        "draw_as_one_process",
        "context_parallel_degree",
        "active_microbatches",
        "schedule",
        "virtual_pipeline_degree",
        "device",
        "start_timeout",
        "step_timeout",
        "checkpoint_timeout",
        "program_cache_size",
        "nan_policy",
        "verify",
        "fp16",
        "_fp32_grad_accumulation",
        "bf16",
        "fp16_params",
        "shard_optimizer_state",
        "kernels",
        "prescaled_batch",
        "skip_tracing",
        "tensor_parallel_degree",
        "expert_parallel_degree",
        "tensor_parallel_seed",
        "ddp_dist_backend",
        "overlapping_allreduce",
        "processes_per_host",
        "sharded_data_parallel_degree",
        "sdp_gradient_clipping",
        "sdp_max_live_parameters",
        "sdp_param_persistence_threshold",
    }
    assert set(LATER) == {name for name, key in KEYS.items() if key.unsupported}
    assert {*NO_EFFECT, "sdp_reduce_bucket_size", "sdp_hierarchical_allgather"} == {
        name for name, key in KEYS.items() if key.no_effect
    }


def test_stating_a_default_is_silent():
    defaults = {
        field.name: field.default for field in dataclasses.fields(Config) if field.name in LATER | NO_EFFECT | SHARDED
    }
    assert Config.parse({"partitions": 2, **defaults}) == Config.parse({"partitions": 2})


def test_the_environment_overrides_the_dict_and_overrides_come_between():
    environ = {"SM_HP_MP_PARAMETERS": '{"partitions": 4, "ddp": true}'}
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": "simple"}
    config = Config.parse(parameters, overrides={"microbatches": 8, "partitions": 3}, environ=environ)
    assert (config.pipeline_parallel_degree, config.ddp) == (4, True)
    assert (config.microbatches, config.pipeline) == (8, "simple")
    assert Config.parse(parameters, environ={}).pipeline_parallel_degree == 2


def test_the_environment_is_not_read_unless_it_is_passed(monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", "not JSON")
    assert Config.parse({"partitions": 2}).pipeline_parallel_degree == 2


@pytest.mark.parametrize(
    ("text", "expected", "message"),
    [
        ('{"partitions": 2,\n "ddp" true}', ConfigError, "malformed JSON at line 2, column 8"),
        ("[1]", ConfigTypeError, "expected a JSON object, found list"),
        ('{"ddp": true, "partitions": 2, "ddp": true}', ConfigError, "duplicate key ddp"),
        ('{"partitions": 2.5}', ConfigTypeError, "pipeline_parallel_degree: expected int, found float 2.5"),
        ("[" * 100_000, ConfigError, "nested too deeply"),
    ],
)
def test_a_bad_environment_variable_is_named(text, expected, message):
    [line] = error({}, expected, environ={"SM_HP_MP_PARAMETERS": text})
    assert message in line
    assert "SM_HP_MP_PARAMETERS" in line


def test_the_nested_form_of_an_estimator():
    options = {"enabled": True, "parameters": {"partitions": 2}}
    mpi = {"enabled": True, "processes_per_host": 8}
    nested = {"smdistributed": {"modelparallel": options}, "mpi": mpi}
    assert Config.parse(nested) == Config.parse({"partitions": 2, "processes_per_host": 8})
    nested["mpi"] = {"enabled": 0, "processes_per_host": 8}
    assert Config.parse(nested) == Config.parse({"partitions": 2})
    for nested in (
        {"smdistributed": {"modelparallel": options}, "torch_distributed": {"enabled": True}},
        {"smdistributed": {"modelparallel": {**options, "enabled": 1}}},
        {"modelparallel": options},
        options,
        {"parameters": {"partitions": 2}},
    ):
        assert Config.parse(nested) == Config.parse({"partitions": 2})
    [line] = error({"smdistributed": {"modelparallel": {"enabled": False, "parameters": {}}}})
    assert line == "config.smdistributed.modelparallel: expected enabled: true, found False"
    [line] = error({"smdistributed": {"modelparallel": options}, "ddp": True})
    assert "unexpected beside smdistributed: ddp" in line
    [line] = error({"smdistributed": {"modelparallel": options}, "mpi": {"processes": 8}})
    assert line == "config.mpi: expected enabled, processes_per_host, custom_mpi_options, found processes"
    [line] = error({"smdistributed": {"modelparallel": options}, "torch_distributed": True}, ConfigTypeError)
    assert line == "config.torch_distributed: expected a mapping of options, found bool"
    [line] = error({"smdistributed": {"modelparallel": options}, "mpi": {"enabled": "yes"}}, ConfigTypeError)
    assert line == "config.mpi.enabled: expected true or false, found 'yes'"
    [line] = error({"parameters": 3}, ConfigTypeError)
    assert line == "config.parameters: expected a mapping of parameters, found int"


@pytest.mark.parametrize("source", [None, 3, [("partitions", 2)], {2: 2}])
def test_a_source_that_is_no_mapping_of_names(source):
    [line] = error(source, ConfigTypeError)
    assert line.startswith("config: expected ")


def test_the_constructor_checks_too():
    assert Config(pipeline_parallel_degree=2, microbatches=3) == Config.parse({"partitions": 2, "microbatches": 3})
    with pytest.raises(ConfigError, match="microbatches: expected at least 1"):
        Config(pipeline_parallel_degree=2, microbatches=0)
    with pytest.raises(ConfigUnsupportedError, match="horovod"):
        Config(pipeline_parallel_degree=2, horovod=True)
    config = Config(pipeline_parallel_degree=2)
    assert dataclasses.replace(config, pipeline="simple").pipeline == "simple"


def test_a_config_is_immutable_hashable_and_pickles():
    config = Config.parse({"partitions": 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ddp = True
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, Config.parse({"partitions": 2})}) == 1


def test_files_of_both_kinds(tmp_path):
    parameters = {"partitions": 2, "microbatches": 4, "memory_weight": 0.5}
    (tmp_path / "c.json").write_text(json.dumps(parameters))
    (tmp_path / "c.toml").write_text("partitions = 2\nmicrobatches = 4\nmemory_weight = 0.5\n")
    expected = Config.parse(parameters)
    assert Config.from_file(tmp_path / "c.json") == expected
    assert Config.from_file(str(tmp_path / "c.toml")) == expected
    assert Config.from_file(tmp_path / "c.toml", overrides={"microbatches": 8}).microbatches == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", b'{\n  "partitions": }', "malformed JSON at line 2, column 17"),
        ("c.json", b'{"ddp": true, "ddp": false}', "duplicate key ddp; keep one"),
        ("c.json", b"\xff\xfe", "not UTF-8 text at byte 0"),
        ("c.toml", b"partitions = \n", "malformed TOML: Invalid value (at line 1, column 14)"),
        ("c.toml", b"ddp = true\nddp = true\n", "malformed TOML: Cannot overwrite a value"),
        ("c.yaml", b"", "expected a .json or .toml file"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.from_file(tmp_path / name)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / name}: {message}")
    assert "\n" not in text


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json: cannot read it: No such file"):
        read_file(tmp_path / "absent.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: expected a file, found a folder"):
        read_file(tmp_path / "folder.json")


def test_an_error_in_a_file_names_the_file_beside_the_key(tmp_path):
    (tmp_path / "c.json").write_text('{"partitions": 2, "microbatches": 0, "pipline": "simple"}')
    with pytest.raises(ConfigError) as caught:
        Config.from_file(tmp_path / "c.json")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"Unrecognized config parameter pipline; did you mean pipeline? ({tmp_path / 'c.json'})"
    assert lines[1] == f"microbatches: expected at least 1, found 0 ({tmp_path / 'c.json'})"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"tensor_parallel_plan": "best"},
            "expected one of modules, auto, huggingface, styles by name pattern, or a .json file of such, found 'best'",
        ),
        ({"tensor_parallel_plan": {"up": "colwise"}}, "requires prescaled_batch: true"),
        ({"tensor_parallel_plan": {}}, "tensor_parallel_plan: expected at least one entry, found {}"),
        ({"tensor_parallel_plan": {"up": 3, 4: "x"}}, "tensor_parallel_plan: expected str: str, found 'up': 3, 4: 'x'"),
        ({"tensor_parallel_plan": 3}, r"tensor_parallel_plan: expected str or dict\[str, str\], found int 3"),
        ({"kernels": {"up": "colwise"}}, "kernels: expected str, found dict"),
        ({"tensor_parallel_plan": "auto"}, "auto requires prescaled_batch: true"),
        ({"tensor_parallel_outputs": "loss"}, "loss requires a tensor_parallel_plan, found modules"),
    ],
)
def test_tensor_parallel_plans_that_cannot_be(keys, message):
    with pytest.raises(ConfigError, match=message):
        Config.parse({"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, **keys})


def test_a_tensor_parallel_plan_of_styles(tmp_path):
    styles = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    keys = {"partitions": 1, "tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    config = Config.parse({**keys, "tensor_parallel_plan": styles})
    assert config.tensor_parallel_plan == styles
    assert config.tensor_parallel_plan is not styles
    (tmp_path / "c.json").write_text(json.dumps({**keys, "tensor_parallel_plan": styles}))
    assert Config.from_file(tmp_path / "c.json") == config
    other = Config.parse(
        {**keys, "tensor_parallel_plan": {"up": "rowwise"}}, overrides={"tensor_parallel_plan": styles}
    )
    assert other == config


def test_a_tensor_parallel_plan_for_any_degree():
    for degree in (1, 2):
        keys = {"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": degree > 1}
        assert Config.parse({"partitions": 1, "tensor_parallel_plan": "auto", **keys}).tensor_parallel_plan == "auto"


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"ddp": False}, "requires ddp: true"),
        ({"shard_optimizer_state": True}, "fully_shard: true and shard_optimizer_state: true exclude each other"),
    ],
)
def test_what_fully_shard_goes_with(others, text):
    sound = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "fully_shard": True, "schedule": "1f1b"}
    assert Config.parse(sound).fully_shard
    with pytest.raises(ConfigError, match=re.escape(text)):
        Config.parse(sound | others)
