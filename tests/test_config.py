"""The configuration: what is accepted, what is refused and in which words."""

import base64
import copy
import json
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_course.config import Config, ConfigError, ZeroOptimization, build_optimizer_class, load_config
from zero_course.config.batch import BATCH_KEYS, solve_batch
from zero_course.config.components import OPTIMIZERS, SCHEDULERS
from zero_course.config.schema import kind
from zero_course.config.values import Section

BATCH = {"train_batch_size": 8}
TRAIN, MICRO, STEPS = BATCH_KEYS


def load(world_size=2, /, **keys):
    return load_config({**BATCH, **keys}, world_size)


def problems(config, world_size=2, **auto):
    with pytest.raises(ConfigError) as caught:
        load_config(config, world_size, **auto)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def only_problem(config, world_size=2, **auto):
    found = problems(config, world_size, **auto)
    assert len(found) == 1, found
    return found[0]


def nested(path, value):
    """{"a": {"b": value}} from "a.b", beside a valid batch size."""
    keys = path.split(".")
    for key in reversed(keys):
        value = {key: value}
    return {**BATCH, **value}


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


# ---- the batch rule -------------------------------------------------------------------------------------------

# The numbers are those that DeepSpeed 0.19.8's DeepSpeedConfig gives at this world size.
SOLVED = [
    (8, {TRAIN: 32, MICRO: 4, STEPS: 1}, (32, 4, 1)),
    (8, {TRAIN: 64, MICRO: 4}, (64, 4, 2)),
    (8, {TRAIN: 64, STEPS: 2}, (64, 4, 2)),
    (8, {MICRO: 4, STEPS: 2}, (64, 4, 2)),
    (8, {TRAIN: 32}, (32, 4, 1)),
    (8, {MICRO: 4}, (32, 4, 1)),
    (2, {TRAIN: 8, MICRO: None, STEPS: None}, (8, 4, 1)),
    (2, {TRAIN: 8.0, MICRO: 4}, (8, 4, 1)),
    (1, {TRAIN: 1}, (1, 1, 1)),
    (3, {TRAIN: 9, STEPS: 3}, (9, 1, 3)),
]


@pytest.mark.parametrize(("world_size", "given", "expected"), SOLVED)
def test_batch_sizes_follow_from_each_other(world_size, given, expected):
    config = load_config(given, world_size)
    got = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert got == expected
    assert all(type(size) is int for size in got)
    assert config.world_size == world_size


# DeepSpeed 0.19.8 refuses each of these too, some of them with a ZeroDivisionError.
UNSOLVED = [
    (
        8,
        {TRAIN: 33, MICRO: 4, STEPS: 1},
        ["33", "4", "1", "world size 8", "= 32", "Set train_batch_size to 32;"],
    ),
    (
        *(2, {TRAIN: 64, MICRO: 4, STEPS: 2}),
        ["= 16", "to 16, or gradient_accumulation_steps to 8, or train_micro_batch_size_per_gpu to 16"],
    ),
    (8, {TRAIN: 33, MICRO: 4}, ["33", "4", "(left out)", "world size 8", "multiple of 32", "to 32 or 64"]),
    (8, {TRAIN: 65, STEPS: 2}, ["65", "(left out)", "2", "world size 8", "multiple of 16", "to 64 or 80"]),
    (8, {TRAIN: 33}, ["33", "world size 8", "multiple of 8", "to 32 or 40"]),
    (8, {TRAIN: 4}, ["train_batch_size 4", "world size 8", "to 8."]),
    (2, {TRAIN: 4, MICRO: 4}, ["multiple of 8", "to 8."]),
]


@pytest.mark.parametrize(("world_size", "given", "words"), UNSOLVED)
def test_a_contradiction_names_all_four_numbers_and_a_fix(world_size, given, words):
    message = only_problem(given, world_size)
    for word in [*words, *BATCH_KEYS, "The DataLoader's batch size is the micro-batch"]:
        assert word in message


@pytest.mark.parametrize("given", [{}, {STEPS: 4}, {TRAIN: None}])
def test_without_a_batch_size_the_message_says_what_to_set(given):
    message = only_problem(given, 4)
    assert message.startswith("train_micro_batch_size_per_gpu: set it")
    assert "or train_batch_size" in message
    assert "world size 4" in message


@pytest.mark.parametrize("key", BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -4, 1.5, "8", True, [8], math.inf, math.nan])
def test_a_batch_size_is_a_whole_number_above_0(key, value):
    message = only_problem({MICRO: 2, TRAIN: 8, key: value})
    assert re.match(rf"{key}: must be a whole number >= 1, got ", message)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 9),
    st.sets(st.sampled_from(BATCH_KEYS)),
)
def test_the_batch_rule_holds_or_a_suggested_fix_works(train, micro, steps, world_size, left_out):
    given = {k: v for k, v in {TRAIN: train, MICRO: micro, STEPS: steps}.items() if k not in left_out}
    if TRAIN not in given and MICRO not in given:
        return
    try:
        solved = solve_batch(given, world_size)
    except ValueError as reason:
        fixes = re.findall(r"(\w+) to (\d+)(?: or (\d+))?", str(reason).split(". Set ")[1])
        assert fixes
        for key, *values in fixes:
            for value in filter(None, values):
                fixed = solve_batch({**given, key: int(value)}, world_size)
                assert fixed[TRAIN] == fixed[MICRO] * fixed[STEPS] * world_size
    else:
        assert solved[TRAIN] == solved[MICRO] * solved[STEPS] * world_size
        assert given.items() <= solved.items()
        assert min(solved.values()) > 0


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2", None])
def test_the_world_size_is_checked(world_size):
    assert "world_size: must be a whole number >= 1" in only_problem(BATCH, world_size)


# ---- values and defaults --------------------------------------------------------------------------------------

# From DeepSpeed's documentation and runtime/zero/config.py, 0.19.8.
DEFAULTS = {
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "optimizer": None,
    "scheduler": None,
    "zero_allow_untested_optimizer": False,
    "checkpoint.tag_validation": "Warn",
    "tensorboard.enabled": False,
    "tensorboard.job_name": "DeepSpeedJobName",
    "csv_monitor.output_path": "",
    "comms_logger.prof_all": True,
    "zero_optimization.stage": 0,
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
    "zero_optimization.offload_optimizer.buffer_count": 4,
    "zero_optimization.offload_param.buffer_count": 5,
    "zero_optimization.offload_param.buffer_size": 100_000_000,
    "zero_optimization.zero_hpz_partition_size": 1,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "bf16.check_grad_overflow": True,
    "aio.block_size": 1048576,
    "aio.queue_depth": 8,
    "flops_profiler.profile_step": 1,
    "flops_profiler.module_depth": -1,
}


@pytest.mark.parametrize("path", DEFAULTS)
def test_defaults_are_deepspeeds(path):
    assert at(load(), path) == DEFAULTS[path]


def leaves(model, prefix=""):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


LEAVES = dict(leaves(Config))
COMPONENT_LEAVES = {
    f"{section}.params.{name}": field
    for section, models in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS))
    for model in models.values()
    for name, field in model.model_fields.items()
}


@pytest.mark.parametrize("path", [path for path in LEAVES if LEAVES[path].default is not None])
def test_every_key_written_with_its_default_changes_nothing(path):
    if path in BATCH_KEYS:
        return
    default = LEAVES[path].default
    config = load_config(nested(path, default), 2)
    assert at(config, path) == default
    assert config.notes == ()


@pytest.mark.parametrize("path", LEAVES)
def test_every_key_may_be_null(path):
    if path not in BATCH_KEYS:
        assert at(load_config(nested(path, None), 2), path) == at(load(), path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_comm_is_on_by_default_in_stage_3_alone(stage):
    assert load(zero_optimization={"stage": stage}).zero_optimization.overlap_comm is (stage == 3)
    for wanted in (True, False):
        zero = load(zero_optimization={"stage": stage, "overlap_comm": wanted}).zero_optimization
        assert zero.overlap_comm is wanted
    assert "overlap_comm" not in ZeroOptimization(stage=3).model_fields_set


@pytest.mark.parametrize(("written", "read"), [(5e8, 500_000_000), (4.0, 4), (7, 7), (1e3, 1000)])
def test_a_whole_number_may_be_written_as_a_float(written, read):
    size = load(zero_optimization={"reduce_bucket_size": written}).zero_optimization.reduce_bucket_size
    assert size == read
    assert type(size) is int


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("zero_optimization.reduce_bucket_size", 1.5, "must be a whole number >= 1, got 1.5"),
        ("zero_optimization.reduce_bucket_size", "5e8", 'must be a whole number >= 1, got "5e8"'),
        ("zero_optimization.reduce_bucket_size", 0, "must be a whole number >= 1, got 0"),
        ("zero_optimization.stage3_prefetch_bucket_size", -1, "must be a whole number >= 0, got -1"),
        ("zero_optimization.stage", 4, "must be 0, 1, 2 or 3, got 4"),
        ("zero_optimization.stage", "2", 'must be a whole number, got "2"'),
        ("zero_optimization.stage", True, "must be a whole number, got true"),
        ("zero_optimization.overlap_comm", "yes", 'must be true or false, got "yes"'),
        ("zero_optimization.overlap_comm", 1, "must be true or false, got 1"),
        ("zero_optimization.round_robin_gradients", "no", 'must be true or false, got "no"'),
        ("zero_optimization", 3, "must be an object in braces, {...}, got 3"),
        ("zero_optimization.offload_param", "cpu", 'must be an object in braces, {...}, got "cpu"'),
        ("zero_optimization.offload_param.device", "disk", "must be 'none', 'cpu' or 'nvme', got \"disk\""),
        ("gradient_clipping", -1, "must be a finite number >= 0, got -1"),
        ("gradient_clipping", "1", 'must be a finite number >= 0, got "1"'),
        ("gradient_clipping", True, "must be a finite number >= 0, got true"),
        ("gradient_clipping", math.inf, "must be a finite number >= 0, got Infinity"),
        ("steps_per_print", 0, "must be a whole number >= 1, got 0"),
        ("seed", 1.5, "must be a whole number >= 0, got 1.5"),
        ("tensorboard.enabled", "true", 'must be true or false, got "true"'),
        ("tensorboard.output_path", 3, "must be a string, got 3"),
        ("comms_logger.prof_ops", "all_reduce", 'must be a list, got "all_reduce"'),
        (
            "checkpoint.tag_validation",
            "warm",
            "must be 'Ignore', 'Warn' or 'Fail', got \"Warm\", did you mean 'Warn'?",
        ),
        ("fp16.loss_scale", True, "must be a finite number >= 0, got true"),
        ("fp16.loss_scale", -1, "must be a finite number >= 0, got -1"),
        ("fp16.loss_scale", math.inf, "must be a finite number >= 0, got Infinity"),
        ("fp16.loss_scale", math.nan, "must be a finite number >= 0, got NaN"),
        ("fp16.hysteresis", -math.inf, "must be a whole number, got -Infinity"),
        ("fp16", True, "must be an object in braces, {...}, got true"),
        ("optimizer", "AdamW", 'must be an object {"type": ..., "params": {...}}, got "AdamW"'),
        ("optimizer.type", 3, "must be one of Adam, AdamW, SGD, got 3"),
        ("scheduler", [], 'must be an object {"type": ..., "params": {...}}, got []'),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(path, value, message):
    assert only_problem(nested(path, value)).startswith(f"{path}: {message}")


@pytest.mark.parametrize("mode", ["Fail", "FAIL", "fail", "Ignore", "IGNORE", "warn"])
def test_tag_validation_may_be_in_any_case(mode):
    assert load(checkpoint={"tag_validation": mode}).checkpoint.tag_validation == mode.capitalize()


def test_accelerates_infinite_steps_per_print_is_never():
    assert load(steps_per_print=math.inf).steps_per_print is None
    assert load(steps_per_print=10).steps_per_print == 10


def test_clipping_may_be_off():
    assert load(gradient_clipping=0).gradient_clipping == 0.0


# ---- unknown keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("zero_optimisation", ", did you mean 'zero_optimization'?"),
        ("Gradient_Clipping", ", did you mean 'gradient_clipping'?"),
        ("gradient_acumulation_steps", ", did you mean 'gradient_accumulation_steps'?"),
        ("train_micro_batch_size", ", did you mean 'train_micro_batch_size_per_gpu'?"),
        ("micro_batch_size", ", did you mean 'train_micro_batch_size_per_gpu'?"),
        ("zero_optimization.stag", ", did you mean 'stage'?"),
        ("zero_optimization.overlap_com", ", did you mean 'overlap_comm'?"),
        ("zero_optimization.offload_optimizer.devise", ", did you mean 'device'?"),
        ("tensorboard.job_nam", ", did you mean 'job_name'?"),
        ("fp16.enable", ", did you mean 'enabled'?"),
        ("stage", "; it belongs at 'zero_optimization.stage'"),
        ("reduce_bucket_size", "; it belongs at 'zero_optimization.reduce_bucket_size'"),
        ("lr", "; it belongs at 'optimizer.params.lr'"),
        ("zero_optimization.gradient_clipping", "; it belongs at 'gradient_clipping'"),
        ("xyzzy", "; there is no such key in DeepSpeed"),
        ("zero_optimization.xyzzy", "; there is no such key in zero_optimization"),
        ("world_size", "; there is no such key in DeepSpeed"),
        ("_notes", "; there is no such key in DeepSpeed"),
    ],
)
def test_a_misspelt_key_is_an_error_with_its_path_and_the_nearest(path, hint):
    assert only_problem(nested(path, 1)) == f"{path}: unknown key{hint}"


def test_a_misspelt_batch_size_is_not_reported_as_a_missing_one_too():
    assert "did you mean 'train_micro_batch_size_per_gpu'?" in only_problem({"train_micro_batch_size": 4})
    assert len(problems({"seeed": 4})) == 2


def one_letter_wrong(word):
    return word[:3] + "q" + word[3:]


@pytest.mark.parametrize("path", LEAVES)
def test_every_key_is_found_again_with_a_letter_wrong(path):
    *sections, name = path.split(".")
    if len(name) < 5:
        return
    wrong = ".".join([*sections, one_letter_wrong(name)])
    message = only_problem(nested(wrong, 1))
    assert message.startswith(f"{wrong}: unknown key, did you mean '{name}'?")


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_every_parameter_is_found_again_with_a_letter_wrong(section):
    required = {"total_num_steps": 9, "cycle_min_lr": 0.1, "cycle_max_lr": 0.1}
    for name, model in {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}[section].items():
        params = {key: value for key, value in required.items() if key in model.model_fields}
        for key in model.model_fields:
            if len(key) < 5:
                continue
            wrong = one_letter_wrong(key)
            message = only_problem({**BATCH, section: {"type": name, "params": {**params, wrong: 1}}})
            assert message == f"{section}.params.{wrong}: unknown key, did you mean '{key}'?"


def test_all_problems_are_reported_at_once_under_the_files_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 33,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clippin": 1,
                "fp16": {"enabled": True},
                "zero_optimization": {"stage": 7, "reduce_bucket_size": 0.5},
                "optimizer": {"type": "AdamW", "params": {"lr": -1, "wight_decay": 0}},
                "scheduler": {"type": "WarmUp"},
            }
        )
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, 2)
    begins = sorted(problem.split(":")[0].split(" ")[0] for problem in caught.value.problems)
    assert begins == [
        *("fp16.enabled", "gradient_clippin", "optimizer.params.lr", "optimizer.params.wight_decay"),
        *(
            "scheduler.type",
            "train_batch_size",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.stage",
        ),
    ]
    assert str(caught.value).startswith(f"{path}, 8 problems:\n  ")


# ---- known to DeepSpeed, not built here ------------------------------------------------------------------------

NOT_BUILT = {
    "fp16.enabled": True,
    "bf16.enabled": True,
    "torch_autocast.enabled": True,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_nontrainable_weights": True,
    "zero_optimization.zero_quantized_gradients": True,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.leaf_module": {"names": ["experts"]},
    "data_types.grad_accum_dtype": "fp32",
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "activation_checkpointing.partition_activations": True,
    "activation_checkpointing.cpu_checkpointing": True,
    "activation_checkpointing.contiguous_memory_optimization": True,
    "flops_profiler.enabled": True,
    "wandb.enabled": True,
    "comet": {"enabled": True},
    "pipeline.stages": 4,
    "pipeline.activation_checkpoint_interval": 1,
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.tp.tp_size": 2,
    "checkpoint.load_universal": True,
    "checkpoint.use_node_local_storage": True,
    "checkpoint.writer": {"type": "FAST"},
    "prescale_gradients": True,
    "gradient_allreduce_op": "sum",
    "communication_data_type": "fp16",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "autotuning": {"enabled": True},
    "compile": {"deepcompile": True},
    "data_efficiency": {"enabled": True},
    "datastates_ckpt": {"host_cache_size": 16},
    "expert_parallel": {"enabled": True},
    "hybrid_engine": {"enabled": True},
    "weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}},
}
DROPPED = {
    "zero_optimization.mics_shard_size": 4,
    "zero_optimization.mics_hierarchical_params_gather": True,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "amp": {"enabled": True},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "curriculum_learning": {"enabled": True},
    "eigenvalue": {"enabled": True},
    "elasticity": {"enabled": True},
    "graph_harvesting": True,
    "nebula": {"enabled": True},
    "progressive_layer_drop": {"enabled": True},
    "quantize_training": {"enabled": True},
    "sparse_attention": {"mode": "fixed"},
    "sparse_gradients": True,
}


def test_the_tables_cover_every_key_that_is_not_built():
    assert NOT_BUILT.keys() == {path for path, field in LEAVES.items() if kind(field) == "later"}
    assert DROPPED.keys() == {path for path, field in LEAVES.items() if kind(field) == "dropped"}


@pytest.mark.parametrize(("path", "value"), {**NOT_BUILT, **DROPPED}.items())
def test_what_is_not_built_is_refused_with_a_way_out(path, value):
    message = only_problem(nested(path, value))
    known = "known to DeepSpeed" if path in NOT_BUILT else "dropped from DeepSpeed in 0.19"
    assert message.startswith(f"{path} = ")
    assert f": {known}, not built in zero_course yet; remove it" in message
    # The way out works: the value it names, or leaving the key out.
    named = re.search(r"set it to (.+)$", message)
    config = load_config(nested(path, json.loads(named[1])) if named else BATCH, 2)
    assert at(config, path) == LEAVES[path].default


@pytest.mark.parametrize(
    "path", [p for p in {**NOT_BUILT, **DROPPED} if LEAVES[p].annotation not in (str, bool, int)]
)
@pytest.mark.parametrize("off", [{}, False, {"enabled": False}, {"enabled": False, "other": 3}])
def test_a_section_that_is_switched_off_is_silent(path, off):
    if LEAVES[path].default is None and LEAVES[path].annotation is not str:
        assert load_config(nested(path, off), 2).notes == ()


def test_fp16_and_bf16_together_are_refused():
    found = problems({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert found[0].startswith("fp16.enabled and bf16.enabled: both are true")


def test_a_disabled_section_may_hold_any_valid_settings():
    config = load(
        fp16={"enabled": False, "loss_scale": 128, "loss_scale_window": 500, "min_loss_scale": 1e-0},
        flops_profiler={"enabled": False, "profile_step": 5, "output_file": "flops.txt"},
        wandb={"enabled": False, "project": "mine"},
        aio={"block_size": 262144, "queue_depth": 32},
        zero_optimization={
            "stage": 2,
            "offload_optimizer": {"device": "none", "pin_memory": True, "ratio": 0.5},
        },
    )
    assert config.notes == ()
    assert config.fp16.loss_scale == 128.0


# ---- hints ----------------------------------------------------------------------------------------------------

HINTS = {path: field for path, field in LEAVES.items() if kind(field) == "hint"}


def other_value(field):
    if isinstance(field.default, bool):
        return not field.default
    return 3 if isinstance(field.default, (int, float)) else "info"


@pytest.mark.parametrize("path", HINTS)
def test_a_hint_is_accepted_and_noted(path):
    value = other_value(HINTS[path])
    config = load_config(nested(path, value), 2)
    (note,) = config.notes
    assert note.startswith(f"{path} = {json.dumps(at(config, path))}: no effect here, ")
    assert at(config, path) == value


def test_named_hints_are_hints():
    for key in (
        *("round_robin_gradients", "contiguous_gradients", "sub_group_size", "allgather_bucket_size"),
        *("allgather_partitions", "reduce_scatter", "ignore_unused_parameters"),
    ):
        assert f"zero_optimization.{key}" in HINTS


# ---- old spellings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "stage"), [(True, 1), (False, 0)])
def test_zero_optimization_as_a_bool(old, stage):
    config = load(zero_optimization=old)
    assert config.zero_optimization.stage == stage
    assert config.notes == (f"zero_optimization = {json.dumps(old)} is read as stage {stage}",)


def test_allgather_size_belongs_to_the_bool_form():
    config = load(zero_optimization=True, allgather_size=2e8)
    assert config.zero_optimization.allgather_bucket_size == 200_000_000
    assert "allgather_size is read as zero_optimization.allgather_bucket_size" in config.notes
    assert "allgather_size: unknown key" in only_problem({**BATCH, "allgather_size": 2e8})


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", True),
        ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", True),
        ("prefetch_bucket_size", "stage3_prefetch_bucket_size", 123),
        ("param_persistence_threshold", "stage3_param_persistence_threshold", 123),
        ("max_live_parameters", "stage3_max_live_parameters", 123),
        ("max_reuse_distance", "stage3_max_reuse_distance", 123),
        ("model_persistence_threshold", "stage3_model_persistence_threshold", 123),
    ],
)
def test_old_names_are_read_with_a_note(old, new, value):
    config = load(zero_optimization={old: value})
    assert getattr(config.zero_optimization, new) == value
    assert (
        config.notes[0] == f"zero_optimization.{old} is read as zero_optimization.{new} = {json.dumps(value)}"
    )
    both = only_problem(nested("zero_optimization", {old: value, new: value}))
    assert both.startswith(f"zero_optimization.{old}: is the old spelling of zero_optimization.{new}")


@pytest.mark.parametrize(
    ("old", "new"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")]
)
def test_cpu_offload(old, new):
    config = load(zero_optimization={"stage": 2, old: False, "cpu_offload_use_pin_memory": True})
    assert getattr(config.zero_optimization, new).device == "none"
    assert len(config.notes) == 2
    with pytest.raises(ConfigError) as caught:
        load(zero_optimization={"stage": 2, old: True})
    assert f'zero_optimization.{new}.device = "cpu": known to DeepSpeed, not built' in str(caught.value)
    assert f"zero_optimization.{old} is read as zero_optimization.{new}" in str(caught.value)


def test_bfloat16_is_bf16():
    assert load(bfloat16={"enabled": False}).bf16.enabled is False
    assert only_problem({**BATCH, "bfloat16": {"enabled": True}}).startswith("bf16.enabled = true")


# ---- optimizers -----------------------------------------------------------------------------------------------


def optimizer(kind, **params):
    return {"type": kind, "params": params}


@pytest.mark.parametrize(
    ("section", "cls", "kwargs"),
    [
        (optimizer("AdamW"), torch.optim.AdamW, {}),
        (optimizer("Adam"), torch.optim.AdamW, {}),
        (optimizer("adam", adam_w_mode=True), torch.optim.AdamW, {}),
        (optimizer("Adam", adam_w_mode=False), torch.optim.Adam, {}),
        (optimizer("AdamW", adam_w_mode=False), torch.optim.AdamW, {}),
        (optimizer("AdamW", torch_adam=True), torch.optim.AdamW, {"weight_decay": 0.01}),
        (optimizer("Adam", torch_adam=True), torch.optim.AdamW, {"weight_decay": 0.01}),
        (optimizer("Adam", torch_adam=True, adam_w_mode=False), torch.optim.Adam, {}),
        (optimizer("AdamW", torch_adam=True, adam_w_mode=False), torch.optim.AdamW, {"weight_decay": 0.01}),
        (optimizer("AdamW", torch_adam=True, weight_decay=0), torch.optim.AdamW, {"weight_decay": 0.0}),
        (optimizer("AdamW", lr=3e-4, eps=1e-6), torch.optim.AdamW, {"lr": 3e-4, "eps": 1e-6}),
        (optimizer("AdamW", betas=[0.8, 0.95]), torch.optim.AdamW, {"betas": (0.8, 0.95)}),
        (optimizer("AdamW", amsgrad=True, foreach=False), torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        ({"type": "AdamW"}, torch.optim.AdamW, {}),
    ],
)  # fmt: skip
def test_adam_becomes_the_right_torch_class(section, cls, kwargs):
    chosen, arguments = build_optimizer_class(load(optimizer=section))
    assert chosen is cls
    assert arguments == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **kwargs}
    chosen([torch.nn.Parameter(torch.zeros(2))], **arguments)


def test_sgd_has_torchs_defaults():
    chosen, arguments = build_optimizer_class(load(optimizer=optimizer("sgd")))
    assert chosen is torch.optim.SGD
    made = chosen([torch.nn.Parameter(torch.zeros(2))], **arguments)
    assert made.defaults == torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]).defaults
    section = optimizer("SGD", lr=0.1, momentum=0.9, dampening=0, nesterov=True, weight_decay=1e-4)
    _, arguments = build_optimizer_class(load(optimizer=section))
    assert arguments == {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "weight_decay": 1e-4}


def test_adam_w_mode_decides_where_the_decay_goes():
    """With gradient 0, AdamW shrinks the weight by 1 - lr x decay; Adam divides the decay's gradient by its size."""
    after = {}
    for mode in (True, False):
        chosen, arguments = build_optimizer_class(
            load(optimizer=optimizer("Adam", adam_w_mode=mode, lr=0.1, weight_decay=0.5))
        )
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.zeros(1)
        chosen([weight], **arguments).step()
        after[mode] = weight.item()
    assert after[True] == pytest.approx(1 - 0.1 * 0.5)
    assert after[False] == pytest.approx(1 - 0.1)


def test_torch_adam_takes_torchs_default_decay_and_says_so():
    assert torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults["weight_decay"] == 0.01
    assert "0.01" in load(optimizer=optimizer("AdamW", torch_adam=True)).notes[0]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"params": {}}, "optimizer.type: is required, one of Adam, AdamW, SGD"),
        ({"type": "Adma"}, "optimizer.type: must be one of Adam, AdamW, SGD, got \"Adma\", did you mean 'Adam'?"),
        ({"type": "RMSprop"}, 'optimizer.type: must be one of Adam, AdamW, SGD, got "RMSprop" (or make the optimizer'),
        ({"type": "AdamW", "param": {}}, "optimizer.param: unknown key, did you mean 'params'?"),
        ({"type": "AdamW", "params": 3}, "optimizer.params: must be an object in braces, {...}, got 3"),
        (optimizer("AdamW", lr=-1), "optimizer.params.lr: must be a finite number >= 0, got -1"),
        (optimizer("AdamW", lr="1e-3"), 'optimizer.params.lr: must be a finite number >= 0, got "1e-3"'),
        (optimizer("AdamW", betas=[0.9]), "optimizer.params.betas: must be two numbers in [0, 1)"),
        (optimizer("AdamW", betas=[0.9, 1.0]), "optimizer.params.betas: must be two numbers in [0, 1)"),
        (optimizer("AdamW", betas=0.9), "optimizer.params.betas: must be two numbers in [0, 1)"),
        (optimizer("AdamW", bias_correction=False), "optimizer.params.bias_correction = false: known to DeepSpeed"),
        (optimizer("Adam", fp32_optimizer_states=False), "optimizer.params.fp32_optimizer_states = false: known"),
        (optimizer("AdamW", momentum=0.9), "optimizer.params.momentum: unknown key; momentum is a parameter of"),
        (optimizer("AdamW", wieght_decay=1), "optimizer.params.wieght_decay: unknown key, did you mean 'weight_decay'"),
        (optimizer("AdamW", max_grad_norm=1), "optimizer.params.max_grad_norm: unknown key; write the top-level key"),
        (optimizer("SGD", dampening=-math.inf), "optimizer.params.dampening: must be a finite number, got -Infinity"),
        (optimizer("SGD", nesterov=True), "optimizer.params: nesterov needs momentum > 0 and dampening 0"),
        (optimizer("SGD", momentm=0.9), "optimizer.params.momentm: unknown key, did you mean 'momentum'?"),
    ],
)  # fmt: skip
def test_wrong_optimizer_sections(section, message):
    assert only_problem({**BATCH, "optimizer": section}).startswith(message)


@pytest.mark.parametrize(
    "name", ["Adagrad", "Lamb", "Lion", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "muon", "MuAdamW"]
)
def test_deepspeeds_other_optimizers_are_known_but_not_built(name):
    message = only_problem({**BATCH, "optimizer": {"type": name, "params": {"freeze_step": 3}}})
    assert message.startswith(f'optimizer.type = "{name}": known to DeepSpeed, not built in zero_course yet')
    assert "Adam, AdamW, SGD" in message


def test_without_an_optimizer_section_the_builder_says_so():
    with pytest.raises(ConfigError, match="optimizer: is missing; add"):
        build_optimizer_class(load())


# ---- schedulers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "scheduler.type: is required, one of LRRangeTest, OneCycle"),
        ({"type": "WarmupDecay"}, "did you mean 'WarmupDecayLR'?"),
        ({"type": "StepLR"}, "or make the scheduler in Python and pass it to initialize"),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: is required"),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 9}},
            "scheduler.params.total_num_steps: unknown key",
        ),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "must be a whole number >= 1, got 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "linaer"}}, "got \"linaer\", did you mean 'linear'?"),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": "big"}},
            "or a list of them, one for each parameter group",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": []}},
            "or a list of them, one for each parameter group",
        ),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0}}, "scheduler.params.cycle_max_lr: is required"),
        ({"type": "LRRangeTest", "params": {"lr_range_test_staircase": 1}}, "must be true or false, got 1"),
    ],
)
def test_wrong_scheduler_sections(section, message):
    assert message in only_problem({**BATCH, "scheduler": section})


def test_scheduler_parameters_are_typed_and_complete():
    scheduler = load(scheduler={"type": "warmuplr", "params": {"warmup_num_steps": 1e2}}).scheduler
    assert scheduler.type == "WarmupLR"
    assert scheduler.params.warmup_num_steps == 100
    assert scheduler.params.warmup_type == "log"


def test_surprises_of_a_schedule_are_noted():
    late = load(scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": 5}})
    assert "total_num_steps < warmup_num_steps" in late.notes[0]
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}
    assert "beta2 to 0.99" in load(scheduler=cycle).notes[0]


# ---- "auto" ---------------------------------------------------------------------------------------------------

HUGGING_FACE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            **{"warmup_min_lr": "auto", "warmup_max_lr": "auto"},
            **{"warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": math.inf,
    "wall_clock_breakdown": False,
}
FROM_THE_TRAINER = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.8, 0.99],
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "zero_optimization.reduce_bucket_size": 768 * 768,
    "something.else": "entirely",
}


def test_a_hugging_face_config_is_filled_in():
    before = copy.deepcopy(HUGGING_FACE)
    config = load_config(HUGGING_FACE, 2, FROM_THE_TRAINER, gradient_clipping=0.5)
    assert before == HUGGING_FACE
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (16, 4)
    assert config.gradient_clipping == 0.5
    assert config.zero_optimization.reduce_bucket_size == 768 * 768
    assert config.optimizer.params.betas == (0.8, 0.99)
    params = config.scheduler.params
    assert (params.warmup_min_lr, params.warmup_max_lr, params.total_num_steps) == (0.0, 5e-5, 100)
    # Those that nobody has a value for take their defaults, and the notes say so.
    assert config.optimizer.params.weight_decay == 0.0
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert {note.split(" = ")[0] for note in config.notes} == {
        *("fp16.enabled", "bf16.enabled", "optimizer.params.eps", "optimizer.params.weight_decay"),
        *(
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
        ),
    }


def test_auto_values_may_be_given_by_last_name_and_as_keywords():
    raw = {MICRO: "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config = load_config(raw, 2, auto={"lr": 0.5}, train_micro_batch_size_per_gpu=3)
    assert config.train_micro_batch_size_per_gpu == 3
    assert config.optimizer.params.lr == 0.5


def test_a_value_in_the_config_beats_one_from_the_caller():
    assert load_config({**BATCH, "gradient_clipping": 2}, 2, gradient_clipping=9).gradient_clipping == 2.0


@pytest.mark.parametrize(
    "path",
    [
        *("optimizer.params.lr", "optimizer.type", "zero_optimization.stage", "scheduler.type"),
        *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
    ],
)
def test_an_auto_that_nobody_can_resolve_is_named(path):
    raw = {
        **BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": 1},
    }
    *sections, key = path.split(".")
    section = raw
    for name in sections:
        section = section[name]
    section[key] = "auto"
    found = [problem for problem in problems(raw) if "auto" in problem]
    assert [problem.split(":")[0] for problem in found] == [path]
    assert f'auto={{"{path}": value}}' in found[0]


def test_batch_sizes_left_to_auto_follow_from_the_others():
    config = load_config({TRAIN: 16, MICRO: "auto", STEPS: "auto"}, 4)
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 1)
    message = only_problem({TRAIN: "auto", MICRO: "auto", STEPS: "auto"}, 4)
    assert MICRO in message
    assert '"auto"' in message


def test_an_auto_value_is_checked_like_any_other():
    raw = {MICRO: "auto", "fp16": {"enabled": "auto"}}
    found = problems(raw, 2, auto={MICRO: "four", "fp16.enabled": True})
    assert sorted(problem.split(":")[0] for problem in found) == ["fp16.enabled = true", MICRO]


def test_auto_is_a_real_value_of_some_keys():
    config = load(pipeline={"stages": "auto"}, data_types={"keep_in_fp32_modules": "auto"})
    assert config.pipeline.stages == "auto"
    assert config.notes == ()


@pytest.mark.parametrize("path", [*LEAVES, *COMPONENT_LEAVES])
def test_auto_never_crashes(path):
    raw = nested(path, "auto")
    for section in ("optimizer", "scheduler"):
        if section in path:
            for name, model in {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}[section].items():
                if path.rpartition(".")[2] in model.model_fields:
                    raw[section]["type"] = name
    try:
        found = load_config(raw, 2).notes
    except ConfigError as error:
        found = error.problems
    silent = path in BATCH_KEYS or path.startswith(
        ("pipeline.stages", "data_types.keep", "scheduler.params.warmup_m")
    )
    assert silent or any(path in line for line in found)


# ---- reading --------------------------------------------------------------------------------------------------


def write(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding=encoding)
    return path


def test_a_file_may_be_named_by_path_or_string(tmp_path):
    path = write(tmp_path, '{"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 5e8}}')
    for named in (path, str(path)):
        config = load_config(named, 2)
        assert config.zero_optimization.reduce_bucket_size == 500_000_000
        assert config.train_micro_batch_size_per_gpu == 4


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    assert load_config(write(tmp_path, json.dumps(BATCH), "utf-8-sig"), 2).train_batch_size == 8


def test_base64_as_deepspeeds_launcher_passes_it():
    # "?" and ">" make the URL-safe alphabet differ from the plain one.
    raw = {**BATCH, "tensorboard": {"job_name": "???>>>~~~"}}
    text = base64.urlsafe_b64encode(json.dumps(raw).encode()).decode()
    assert "_" in text or "-" in text
    assert load_config(text, 2).tensorboard.job_name == "???>>>~~~"
    broken = base64.urlsafe_b64encode(b'{"train_batch_size": }').decode()
    assert "line 1, column" in only_problem(broken)


@pytest.mark.parametrize("name", ["nowhere.json", "a/b/c.json", "abcd", "x" * 300])
def test_a_missing_file_is_named_in_full(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(name, 2)
    assert str(caught.value) == f"{tmp_path / name}:\n  no such file"


def test_other_things_that_are_no_file(tmp_path):
    assert only_problem(tmp_path) == "is a directory, not a JSON file"
    assert (
        only_problem('{"train_batch_size": 8}')
        == "is JSON text; pass the path of a file, or json.loads(text)"
    )
    assert only_problem(3) == "must be a dict or the path of a JSON file, got int 3"
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00{")
    assert only_problem(tmp_path / "bytes.json").startswith("cannot be read:")


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('{\n  "train_batch_size": 8,\n  "seed" 1\n}', 3, 10),
        ('{"train_batch_size": 8', 1, 23),
        ("", 1, 1),
        ("\n\n", 3, 1),
        ('{\n  "a": 1\n', 3, 1),
        ("{'train_batch_size': 8}", 1, 2),
        ('{"train_batch_size": 8} trailing', 1, 25),
    ],
)
def test_a_syntax_error_has_file_line_and_column(tmp_path, text, line, column):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, 2)
    assert str(caught.value).startswith(f"{path}:\n  line {line}, column {column}: not JSON, ")


def test_a_syntax_error_shows_the_line(tmp_path):
    path = write(tmp_path, '{\n  "train_batch_size": 8,\n  // the seed\n  "seed": 1\n}')
    assert only_problem(path).endswith(": // the seed")


@pytest.mark.parametrize("text", ["[1, 2]", "8", '"text"', "null"])
def test_the_top_level_is_an_object(tmp_path, text):
    assert only_problem(write(tmp_path, text)).startswith("must hold one object in braces, {...}, got")


def test_duplicate_keys_are_named(tmp_path):
    path = write(
        tmp_path,
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 2}, "train_batch_size": 16}',
    )
    assert problems(path) == [
        "stage: is written twice, 1 and 2; keep one",
        "train_batch_size: is written twice, 8 and 16; keep one",
    ]


# ---- the object -----------------------------------------------------------------------------------------------


def test_a_config_is_frozen_and_leaves_its_source_alone():
    raw = {**BATCH, "zero_optimization": {"stage": 2, "cpu_offload": False, "overlap_comm": None}, "amp": {}}
    before = copy.deepcopy(raw)
    config = load_config(raw, 2)
    assert raw == before
    for section, name, value in [(config, "train_batch_size", 1), (config.zero_optimization, "stage", 3)]:
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, name, value)


def test_a_config_survives_pickling_to_another_process():
    config = load(zero_optimization={"stage": 1, "round_robin_gradients": True}, optimizer={"type": "SGD"})
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert (again.notes, again.world_size, again.summary()) == (config.notes, 2, config.summary())


def test_what_was_given_can_be_told_from_defaults():
    zero = load(zero_optimization={"stage": 2, "reduce_bucket_size": 5e8}).zero_optimization
    assert zero.model_fields_set == {"stage", "reduce_bucket_size"}


def test_the_summary_shows_values_and_where_they_are_from():
    raw = {
        TRAIN: 16,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.25}},
        "tensorboard": {"enabled": True, "job_name": "mine"},
    }
    rows = [line.split() for line in load_config(raw, 4, gradient_clipping=3).summary().splitlines()]
    assert rows[0] == ["world", "size", "4", "launcher"]
    for row in [
        ["train_batch_size", "16", "config"],
        ["train_micro_batch_size_per_gpu", "4", "derived"],
        ["gradient_accumulation_steps", "1", "derived"],
        ["gradient_clipping", "3.0", "auto"],
        ["zero_optimization.stage", "3", "config"],
        ["zero_optimization.overlap_comm", "true", "default"],
        ["zero_optimization.reduce_bucket_size", "500000000", "default"],
        ["optimizer.type", '"Adam"', "config"],
        ["optimizer.params.lr", "0.25", "config"],
        ["optimizer.params.eps", "1e-08", "default"],
        ["tensorboard.job_name", '"mine"', "config"],
        ["csv_monitor.enabled", "false", "default"],
    ]:
        assert row in rows
    shown = {row[0] for row in rows}
    assert not shown & {"csv_monitor.job_name", "fp16.enabled", "zero_optimization.sub_group_size"}
