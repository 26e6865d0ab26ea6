"""DeepSpeed's memory estimators, by DeepSpeed's names, each line saying which bytes it counts.

These are the formulas of DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py and stage3.py), kept so that a script
that calls them runs unchanged and gives DeepSpeed's numbers. They know neither buckets nor activations and
multiply host memory by a factor for buffers; :func:`zero_course.memory.advise` computes all of that. Two
differences in print only: sizes are labelled GiB, which is what DeepSpeed's "GB" there is, and each line ends
with its count of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .units import format_bytes


@dataclass(frozen=True)
class Estimate:
    """One line of an estimate.

    Attributes:
        cpu_bytes: on each host.
        gpu_bytes: on each GPU.
        options: the settings, as in the configuration file.
        counted: which bytes a parameter were counted on the GPU and on the host.
    """

    cpu_bytes: int
    gpu_bytes: int
    options: str
    counted: str


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes that ZeRO-2 needs: (on each host, on each GPU). GPU 2P + 18P/N, with optimizer offload 2P."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + 18 * total_params // gpus


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """Print, and return, what ZeRO-2 needs with and without optimizer offload, given the number of parameters."""
    estimates = []
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        if offload:
            counted = "GPU 2P (16-bit weights); host max(4N, 16)P"
        else:
            counted = "GPU 2P + 18P/N (2 and 4 gradient, K = 12); host 4P a rank, while loading"
        device = "cpu" if offload else "none"
        estimates.append(Estimate(host, gpu, f"offload_optimizer={device}", counted))
    _print(f"{total_params:,} parameters", num_nodes, num_gpus_per_node, additional_buffer_factor, estimates)
    return estimates


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """:func:`estimate_zero2_model_states_mem_needs_all_cold` with the parameters counted in ``model``."""
    total, _ = model_to_params(model)
    return estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes that ZeRO-3 needs: (on each host, on each GPU, of the largest layer gathered in 16 bits twice).

    GPU 4·largest + 18P/N; with optimizer offload 4·largest + 2P/N; with parameter offload too, 4·largest.
    Parameters are only offloaded along with the optimizer.
    """
    gpus = num_nodes * num_gpus_per_node
    layer = 4 * largest_layer_params
    if cpu_offload:
        on_host = 18 if cpu_offload_params else 16
        gpu = layer if cpu_offload_params else layer + 2 * total_params // gpus
        whole_copies = 0 if zero_init else 4 * num_gpus_per_node
        host = total_params * max(whole_copies, on_host / num_nodes)
    else:
        gpu = layer + 18 * total_params // gpus
        host = (largest_layer_params if zero_init else total_params) * 4 * num_gpus_per_node
    return int(host * additional_buffer_factor), gpu, layer


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """Print, and return, what ZeRO-3 needs under each offload setting, given the parameter counts."""
    estimates = []
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            parts = ["18P/N"] if not offload else [] if offload_params else ["2P/N"]
            on_host = "K = 18" if offload_params else "K = 16" if offload else "4 B"
            counted = f"GPU {' + '.join(['4 x largest layer', *parts])}; host {on_host}"
            options = (
                f"offload_param={'cpu' if offload_params else 'none'}, "
                f"offload_optimizer={'cpu' if offload else 'none'}, zero_init={int(zero_init)}"
            )
            estimates.append(Estimate(host, gpu, options, counted))
    software = f"{total_params:,} parameters, {largest_layer_params:,} in the largest layer"
    _print(software, num_nodes, num_gpus_per_node, additional_buffer_factor, estimates)
    return estimates


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """:func:`estimate_zero3_model_states_mem_needs_all_cold` with the parameters counted in ``model``."""
    total, largest = model_to_params(model)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Parameters of ``model`` (shared ones once), and of the module that owns most of them itself."""
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return total, largest


def _print(software: str, nodes: int, gpus: int, factor: float, estimates: list[Estimate]) -> None:
    print(
        f"Estimated memory for parameters, gradients and optimizer states (P = {software}; "
        f"{nodes} node{'s' * (nodes > 1)} of {gpus} GPU{'s' * (gpus > 1)}, N = {nodes * gpus}; "
        f"host sizes x {factor} for buffers):"
    )
    print(f"{'per host':>12} | {'per GPU':>12} | options | bytes counted")
    for line in estimates:
        host, gpu = (format_bytes(size, binary=True) for size in (line.cpu_bytes, line.gpu_bytes))
        print(f"{host:>12} | {gpu:>12} | {line.options} | {line.counted}")
