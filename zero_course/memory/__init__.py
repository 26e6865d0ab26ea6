"""What a model costs: predict it, measure it, choose for it (chapter 00).

- predict (:mod:`.formulas`): :func:`model_state_bytes`, :func:`zero_table`, :func:`traffic_elements`,
  :func:`activation_bytes` (:mod:`.activations`), and DeepSpeed's own :mod:`.estimators`;
- measure (:mod:`.meter`): :func:`live_bytes`, :func:`live_bytes_by_class`, :func:`live_tensors`,
  :class:`PeakMeter`, :func:`resident_bytes`;
- choose (:mod:`.strategies`, :mod:`.advice`): :func:`advise`, on the command line ``zero-course estimate``.

Bytes are exact integers everywhere; GB is 1e9 and GiB is 2^30 (:mod:`.units`).
"""

from .activations import TransformerShape, activation_bytes
from .advice import Advice, advise
from .estimators import (
    Estimate,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from .formulas import (
    PRESETS,
    ModelStateBytes,
    Preset,
    get_preset,
    model_state_bytes,
    preset_state_bytes,
    ring_bytes,
    ring_seconds,
    traffic_elements,
    zero_table,
)
from .meter import (
    PeakMeter,
    device_bytes,
    live_bytes,
    live_bytes_by_class,
    live_tensors,
    peak_device_bytes,
    peak_resident_bytes,
    resident_bytes,
)
from .strategies import Bandwidths, Strategy, Workload
from .units import format_bytes, format_count, parse_bytes, parse_count

__all__ = [
    "PRESETS",
    "Advice",
    "Bandwidths",
    "Estimate",
    "ModelStateBytes",
    "PeakMeter",
    "Preset",
    "Strategy",
    "TransformerShape",
    "Workload",
    "activation_bytes",
    "advise",
    "device_bytes",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "format_bytes",
    "format_count",
    "get_preset",
    "live_bytes",
    "live_bytes_by_class",
    "live_tensors",
    "model_state_bytes",
    "parse_bytes",
    "parse_count",
    "peak_device_bytes",
    "peak_resident_bytes",
    "preset_state_bytes",
    "resident_bytes",
    "ring_bytes",
    "ring_seconds",
    "traffic_elements",
    "zero_table",
]
