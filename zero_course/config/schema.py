"""The JSON's sections, each a class, from the nested ones up to `Config`, the top level.

In every class the plain fields, which are built, come first; the other kinds follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, model_validator

from zero_course.config.components import OptimizerConfig, SchedulerConfig
from zero_course.config.values import (
    Count,
    Integer,
    Interval,
    NonNegative,
    Positive,
    Section,
    dropped,
    hint,
    idle,
    kind,
    later,
    shown,
    whole,
)

_ONE_WAY = "zero_course has one way of doing this"
_WINDOW = "a parameter is released as soon as its module has run; only the prefetch window is held besides"


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] = later("none")
    nvme_path: str = idle()
    buffer_count: Count = idle(4)
    pin_memory: bool = idle(True)
    pipeline_read: bool = idle(False)
    pipeline_write: bool = idle(False)
    fast_init: bool = idle(False)
    ratio: NonNegative = idle(1.0)
    super_offload: bool = idle(False)
    cpuadam_cores_perc: NonNegative = idle(0.8)


class OffloadParam(Section):
    """`zero_optimization.offload_param`."""

    device: Literal["none", "cpu", "nvme"] = later("none")
    nvme_path: str = idle()
    buffer_count: Count = idle(5)
    buffer_size: Count = idle(10**8)
    max_in_cpu: Count = idle(10**9)
    pin_memory: bool = idle(True)


class ZeroOptimization(Section):
    """`zero_optimization`: the stage and its sizes, all in elements, not bytes."""

    stage: Annotated[Literal[0, 1, 2, 3], whole()] = 0
    reduce_bucket_size: Positive = 5 * 10**8  # gradients reduced at a time
    overlap_comm: bool | None = None  # None: true for stage 3, false below; a bool once loaded
    stage3_prefetch_bucket_size: Count = 5 * 10**7  # gathered ahead of use
    stage3_param_persistence_threshold: Count = 10**5  # parameters smaller than this stay whole on every rank
    stage3_gather_16bit_weights_on_model_save: bool = False  # save_16bit_model may gather the whole model

    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    zero_hpz_partition_size: Count = later(1)
    zero_quantized_weights: bool = later(False)
    zero_quantized_nontrainable_weights: bool = later(False)
    zero_quantized_gradients: bool = later(False)
    zenflow: Any = later()
    leaf_module: Any = later()
    zeropp_loco_param: Any = dropped()
    mics_shard_size: Integer = dropped(-1)
    mics_hierarchical_params_gather: bool = dropped(False)

    allgather_bucket_size: Count = hint(
        5 * 10**8, "parameters are gathered in the buckets of reduce_bucket_size"
    )
    allgather_partitions: bool = hint(True, "parameters are always all-gathered")
    reduce_scatter: bool = hint(True, "gradients are always reduce-scattered")
    contiguous_gradients: bool = hint(True, "gradients always live in contiguous buckets")
    round_robin_gradients: bool = hint(False, "every rank owns an equal part of every bucket already")
    ignore_unused_parameters: bool = hint(True, "an unused parameter has gradient 0 and is never an error")
    sub_group_size: Count = hint(10**9, "it tiles the offloaded optimizer")
    stage3_max_live_parameters: Count = hint(10**9, _WINDOW)
    stage3_max_reuse_distance: Count = hint(10**9, _WINDOW)
    stage3_model_persistence_threshold: Count = hint(sys.maxsize, "persistent parameters have no total limit")
    stage3_module_granularity_threshold: Integer = hint(0, _ONE_WAY)
    stage3_use_all_reduce_for_fetch_params: bool = hint(False, _ONE_WAY)
    stage3_allgather_sequential: bool = hint(False, _ONE_WAY)
    use_multi_rank_bucket_allreduce: bool = hint(True, _ONE_WAY)
    compute_grad_norm: bool = hint(True, "the norm is computed where something needs it")
    elastic_checkpoint: bool = hint(False, _ONE_WAY)
    legacy_stage1: bool = hint(False, _ONE_WAY)
    parameter_alignment: bool = hint(False, _ONE_WAY)
    pipeline_loading_checkpoint: bool = hint(False, _ONE_WAY)
    memory_efficient_linear: bool = hint(True, _ONE_WAY)
    override_module_apply: bool = hint(True, _ONE_WAY)
    log_trace_cache_warnings: bool = hint(False, _ONE_WAY)
    enable_sanity_checks: bool = hint(False, _ONE_WAY)
    load_from_fp32_weights: bool = idle(True)
    save_muon_momentum_buffer_in_memory: bool = idle(False)

    @model_validator(mode="after")
    def _overlap_by_default_in_stage_3(self) -> ZeroOptimization:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = (
                self.stage == 3
            )  # past the freeze, and not counted as set by the user
        return self


class FP16(Section):
    """`fp16`."""

    enabled: bool = later(False)
    auto_cast: bool = idle(False)
    loss_scale: NonNegative = idle(0.0)  # 0: dynamic
    initial_scale_power: Count = idle(16)
    loss_scale_window: Integer = idle(1000)
    hysteresis: Integer = idle(2)
    consecutive_hysteresis: bool = idle(False)
    min_loss_scale: Integer = idle(1)
    fp16_master_weights_and_grads: bool = idle(False)


class BF16(Section):
    """`bf16`."""

    enabled: bool = later(False)
    immediate_grad_update: bool = idle(False)
    check_grad_overflow: bool = idle(True)
    bf16_master_weights_and_grads: bool = idle(False)
    bf16_optimizer_states: bool = idle(False)


class TorchAutocast(Section):
    """`torch_autocast`."""

    enabled: bool = later(False)
    dtype: str = idle()
    lower_precision_safe_modules: list[str] = idle()


class DataTypes(Section):
    """`data_types`."""

    grad_accum_dtype: str = later()
    param_dtype: str = later()
    buffer_dtype: str = later()
    keep_in_fp32_modules: Any = idle("auto")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`."""

    partition_activations: bool = later(False)
    cpu_checkpointing: bool = later(False)
    contiguous_memory_optimization: bool = later(False)
    number_checkpoints: Count = idle()
    synchronize_checkpoint_boundary: bool = hint(False, "it only serves timing")
    profile: bool = hint(False, "it only serves timing")


class FlopsProfiler(Section):
    """`flops_profiler`."""

    enabled: bool = later(False)
    recompute_fwd_factor: NonNegative = idle(0.0)
    profile_step: Count = idle(1)
    module_depth: Integer = idle(-1)
    top_modules: Count = idle(1)
    detailed: bool = idle(True)
    output_file: str = idle()


class CommsLogger(Section):
    """`comms_logger`: prints the traffic ledger's entries."""

    enabled: bool = False
    verbose: bool = False  # each collective as it happens
    prof_all: bool = True  # every collective; otherwise those of prof_ops
    prof_ops: list[str] = []
    debug: bool = hint(False, "the ledger always records the call site")


class MonitorFile(Section):
    """`tensorboard` and `csv_monitor`: a log written under output_path/job_name."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """`wandb`."""

    enabled: bool = later(False)
    group: str = idle()
    team: str = idle()
    project: str = idle("deepspeed")


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: bool = idle(False)


class Checkpoint(Section):
    """`checkpoint`; tag_validation says what to do when ranks save under different tags (any case will do)."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
    ] = "Warn"
    load_universal: bool = later(False)
    use_node_local_storage: bool = later(False)
    writer: Any = later()
    checkpoint_serialization: bool = hint(True, _ONE_WAY)
    parallel_write: ParallelWrite = ParallelWrite()


class Pipeline(Section):
    """`pipeline`."""

    stages: Any = later("auto")
    partition: str = idle("best")
    seed_layers: bool = idle(False)
    activation_checkpoint_interval: Count = later(0)
    pipe_partitioned: bool = idle(True)
    grad_partitioned: bool = idle(True)
    use_reentrant: bool = idle(True)


class TensorParallelGroup(Section):
    """`tensor_parallel.tp`."""

    tp_size: Positive = later(1)
    tp_grain_size: Positive = idle(1)


class TensorParallel(Section):
    """`tensor_parallel`."""

    autotp_size: Count = later(0)
    tp: TensorParallelGroup = TensorParallelGroup()
    dtype: Any = idle()
    tp_overlap_comm: bool = idle(False)
    vocab_parallel_lm_head: bool = idle()
    vocab_parallel_ce_backend: str = idle("torch")
    injection_policy_tuple: Any = idle()
    partition_config: Any = idle()
    preset_model: str = idle()
    keep_module_on_host: bool = idle(False)
    kernel_inject: bool = idle(False)


class AIO(Section):
    """`aio`: file I/O of NVMe offload."""

    block_size: Positive = idle(1048576)
    queue_depth: Positive = idle(8)
    intra_op_parallelism: Positive = idle(1)
    single_submit: bool = idle(False)
    overlap_events: bool = idle(True)
    use_gds: bool = idle(False)


class Config(Section):
    """A DeepSpeed configuration, checked and complete. Made by `load_config`.

    The `model_fields_set` of each section tells what was given from what is a default.
    """

    train_batch_size: Positive = 1  # samples an optimizer step, all ranks together
    train_micro_batch_size_per_gpu: Positive = (
        1  # samples of one forward and backward: the DataLoader's batch
    )
    gradient_accumulation_steps: Positive = 1
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: NonNegative = 1.0  # greatest global norm; 0 is off
    zero_optimization: ZeroOptimization = ZeroOptimization()
    seed: Count | None = None
    steps_per_print: Interval = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    dataloader_drop_last: bool = False
    zero_allow_untested_optimizer: bool = False
    checkpoint: Checkpoint = Checkpoint()
    tensorboard: MonitorFile = MonitorFile()
    csv_monitor: MonitorFile = MonitorFile()
    comms_logger: CommsLogger = CommsLogger()

    fp16: FP16 = FP16()
    bf16: BF16 = BF16()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    wandb: Wandb = Wandb()
    pipeline: Pipeline = Pipeline()
    tensor_parallel: TensorParallel = TensorParallel()
    aio: AIO = AIO()
    prescale_gradients: bool = later(False)
    gradient_allreduce_op: Literal["mean", "sum"] = later("mean")
    communication_data_type: str = later()
    managed_gradient_accumulation: bool = later(True)
    sequence_parallel_size: Positive = later(1)
    autotuning: Any = later()
    comet: Any = later()
    compile: Any = later()
    data_efficiency: Any = later()
    datastates_ckpt: Any = later()
    expert_parallel: Any = later()
    hybrid_engine: Any = later()
    weight_quantization: Any = later()
    amp: Any = dropped()
    compression_training: Any = dropped()
    curriculum_learning: Any = dropped()
    eigenvalue: Any = dropped()
    elasticity: Any = dropped()
    graph_harvesting: Any = dropped()
    nebula: Any = dropped()
    progressive_layer_drop: Any = dropped()
    quantize_training: Any = dropped()
    sparse_attention: Any = dropped()
    sparse_gradients: Any = dropped()

    gradient_predivide_factor: NonNegative = hint(1.0, "the average is taken in one division")
    disable_allgather: bool = hint(False, _ONE_WAY)
    disable_python_gc: bool = hint(False, _ONE_WAY)
    log_level: str = hint(None, "Python's logging decides")
    timers: Any = hint(None, "throughput is always measured")
    seq_parallel_communication_data_type: str = idle()
    use_data_before_expert_parallelism: bool = idle(False)
    vocabulary_size: Count = idle()
    zero_force_ds_cpu_optimizer: bool = idle(True)

    _world_size: int = PrivateAttr(1)
    _notes: tuple[str, ...] = PrivateAttr(())
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks the batch rule was solved for."""
        return self._world_size

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the log should know: keys without effect, old spellings, "auto" left to defaults."""
        return self._notes

    def summary(self) -> str:
        """The resolved values as a table of key, value, and where the value is from."""
        rows = [("world size", str(self.world_size), "launcher")]
        for path, value, given in _plain_leaves(self, ""):
            rows.append((path, shown(value), self._origins.get(path, "config" if given else "default")))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{key:<{widths[0]}}  {value:>{widths[1]}}  {origin}" for key, value, origin in rows)


def _plain_leaves(section: Section, prefix: str) -> Iterator[tuple[str, Any, bool]]:
    """Path, value and whether it was given, of what is built; of a monitor that is off, `enabled` alone."""
    off = getattr(section, "enabled", None) is False
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _plain_leaves(value, f"{prefix}{name}.")
        elif kind(field) == "plain" and (not off or name == "enabled"):
            yield f"{prefix}{name}", value, name in section.model_fields_set


def hints_given(section: Section, prefix: str = "") -> Iterator[str]:
    """A note for each key that was given, is not at its default, and has no effect."""
    for name in sorted(section.model_fields_set):
        field, value = type(section).model_fields[name], getattr(section, name)
        if isinstance(value, Section):
            yield from hints_given(value, f"{prefix}{name}.")
        elif kind(field) == "hint" and value != field.default:
            yield f"{prefix}{name} = {shown(value)}: no effect here, {field.json_schema_extra['why']}"
