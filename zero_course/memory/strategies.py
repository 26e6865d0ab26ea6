"""Where every byte goes under each strategy: on one GPU by class, on one host, on its NVMe; and what it costs.

To the model states of :mod:`.formulas` this adds what they leave out and what decides in practice: buckets of
gradients being reduced, parameters that ZeRO-3 has gathered, activations, and the staging buffers of offload. So
it shows, for one, when ZeRO-2 takes *more* than ZeRO-1: where two buckets weigh more than the gradients saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .formulas import STAGE_NAMES, Preset, model_state_bytes, traffic_elements
from .units import format_bytes

CPU_RESERVE = 0.10  # part of a host's memory that is never usable


@dataclass(frozen=True)
class Bandwidths:
    """What orders the strategies: bytes a second, except ``cpu_adam``. Round figures, to be replaced by yours.

    Attributes:
        network: what a GPU sends within its host.
        network_between_hosts: what a GPU sends when there are several hosts.
        pcie: between a GPU and its host, each way.
        cpu_adam: parameters that a host's CPU-Adam updates a second; the ZeRO-Offload paper [2101.06840] has
            3.3e9 to 4.5e9.
        nvme: of one host.
    """

    network: float = 200e9
    network_between_hosts: float = 25e9
    pcie: float = 16e9
    cpu_adam: float = 4e9
    nvme: float = 10e9


@dataclass(frozen=True)
class Strategy:
    """One strategy on the given hardware.

    Attributes:
        name: e.g. "ZeRO-3 + optimizer on CPU".
        stage: 0 to 3.
        offload_optimizer, offload_param: "none", "cpu" or "nvme", as in the configuration file.
        gpu: bytes on one GPU by class: parameters, gradients, master_weights, optimizer,
            communication_buffers, gathered_parameters, activations.
        cpu_bytes, nvme_bytes: on one host.
        gpu_spare, cpu_spare, nvme_spare: bytes left of what is usable; negative where it does not fit.
        roomy: it fits and leaves the margin of the GPU besides.
        traffic_elements: what one rank sends a step.
        traffic_ratio: the same over DP's.
        seconds: for moving and updating states in one step, nothing overlapped; an ordering only.
    """

    name: str
    stage: int
    offload_optimizer: str
    offload_param: str
    gpu: dict[str, int]
    cpu_bytes: int
    nvme_bytes: int
    gpu_spare: int
    cpu_spare: int
    nvme_spare: int
    roomy: bool
    traffic_elements: int
    traffic_ratio: float
    seconds: float

    @property
    def gpu_bytes(self) -> int:
        """All classes together."""
        return sum(self.gpu.values())

    @property
    def fits(self) -> bool:
        """Whether GPU, host and NVMe all have room."""
        return min(self.gpu_spare, self.cpu_spare, self.nvme_spare) >= 0

    @property
    def verdict(self) -> str:
        """In words: fits, tight, or what is short of how much."""
        if self.fits:
            return "fits" if self.roomy else "tight"
        short = {"GPU": self.gpu_spare, "host": self.cpu_spare, "NVMe": self.nvme_spare}
        return ", ".join(
            f"{place} {format_bytes(-spare)} short" for place, spare in short.items() if spare < 0
        )


@dataclass(frozen=True)
class Workload:
    """A model on given hardware, every default filled in; :func:`zero_course.memory.advise` makes it.

    Attributes:
        parameters: P.
        gpus: N, all data-parallel.
        local: GPUs on the fullest host.
        preset: which bytes a parameter are counted.
        activations: bytes on one GPU.
        bucket: elements of one reduction bucket in stage 2 (in stage 3 a bucket is at least a layer).
        buckets: how many of them there are at once.
        window: parameters that ZeRO-3 has gathered at once, at most.
        largest_layer: parameters of the largest module gathered as one.
        gpu_memory, cpu_memory, nvme: bytes of one GPU, one host, one host's NVMe.
        reserve, margin: parts of a GPU that are never usable, and that are to be left free.
        bandwidths: for ``Strategy.seconds``.
    """

    parameters: int
    gpus: int
    local: int
    preset: Preset
    activations: int
    bucket: int
    buckets: int
    window: int
    largest_layer: int
    gpu_memory: int
    cpu_memory: int
    nvme: int
    reserve: float
    margin: float
    bandwidths: Bandwidths

    @property
    def usable(self) -> int:
        """Bytes of one GPU without its reserve."""
        return int(self.gpu_memory * (1 - self.reserve))

    def strategies(self) -> list[Strategy]:
        """All of them, simplest first: four without offload, then optimizer offload, then all states."""
        kept = [self.strategy(stage, "none", "none") for stage in range(4)]
        offloaded = [self.strategy(stage, "cpu", "none") for stage in range(4)]
        return [*kept, *offloaded, self.strategy(3, "cpu", "cpu"), self.strategy(3, "nvme", "nvme")]

    def strategy(self, stage: int, offload_optimizer: str, offload_param: str) -> Strategy:
        """Bytes, traffic and cost of one strategy."""
        preset = self.preset
        states = model_state_bytes(
            self.parameters,
            self.gpus,
            stage,
            parameter_bytes=preset.parameter_bytes,
            gradient_bytes=preset.gradient_bytes_at(stage),
            optimizer_bytes=preset.optimizer_bytes,
            master_bytes=preset.master_bytes,
        )
        gpu = states.as_dict() | {
            "communication_buffers": self._bucket_bytes(stage) if self.gpus > 1 else 0,
            "gathered_parameters": 0,
            "activations": self.activations,
        }
        if stage == 3 and (self.gpus > 1 or offload_param != "none"):
            gathered = self.window * preset.parameter_bytes + self.largest_layer * preset.stage3_layer_bytes
            gpu["gathered_parameters"] = gathered
        moved = 0  # bytes of states that leave each GPU
        if offload_optimizer != "none":
            moved += states.master_weights + states.optimizer
            gpu["master_weights"] = gpu["optimizer"] = 0
            # The host needs this rank's part of the gradients for its update. From stage 2 on, a gradient leaves
            # the GPU through a bucket as soon as it is reduced, and the rest never adds up there.
            shard = self.parameters if stage == 0 else -(-self.parameters // self.gpus)
            moved += shard * preset.gradient_bytes_at(stage)
            if stage >= 2:
                gpu["gradients"] = 0
                gpu["communication_buffers"] = self._bucket_bytes(stage)
        if offload_param != "none":
            moved += states.parameters
            gpu["parameters"] = 0
        on_host, on_nvme = self._homes(moved, offload_optimizer)
        gpu_spare = self.usable - sum(gpu.values())
        cpu_spare = int(self.cpu_memory * (1 - CPU_RESERVE)) - on_host
        fits = min(gpu_spare, cpu_spare, self.nvme - on_nvme) >= 0
        traffic = traffic_elements(self.parameters, self.gpus, stage)
        return Strategy(
            name=_name(stage, offload_optimizer, offload_param),
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            gpu=gpu,
            cpu_bytes=on_host,
            nvme_bytes=on_nvme,
            gpu_spare=gpu_spare,
            cpu_spare=cpu_spare,
            nvme_spare=self.nvme - on_nvme,
            roomy=fits and gpu_spare >= self.margin * self.gpu_memory,
            traffic_elements=traffic,
            traffic_ratio=1.5 if stage == 3 else 1.0,
            seconds=self._seconds(stage, traffic, offload_optimizer, offload_param, moved),
        )

    def minimum_gpus(self, step: int) -> int | None:
        """The fewest GPUs, a multiple of ``step``, over which the states could be spread, 1/N on each.

        None where no number is enough: what does not shrink with N, a layer and its activations, is too much.
        """
        kept = replace(self, gpus=max(2, self.gpus)).strategy(3, "none", "none").gpu
        fixed = sum(kept[name] for name in ("communication_buffers", "gathered_parameters", "activations"))
        room = int(self.gpu_memory * (1 - self.reserve - self.margin)) - fixed
        if room <= 0:
            return None
        alone = self.preset.parameter_bytes + self.preset.gradient_bytes_at(3) + self.preset.optimizer_bytes
        enough = -(-self.parameters * alone // room)
        return -(-enough // step) * step

    def _bucket_bytes(self, stage: int) -> int:
        """DP and ZeRO-1 keep whole gradients and reduce them where they lie; the others need buckets beside."""
        elements = (0, 0, self.bucket, max(self.bucket, self.largest_layer))[stage]
        return self.buckets * elements * self.preset.gradient_bytes

    def _homes(self, moved: int, device: str) -> tuple[int, int]:
        """Bytes on one host and on its NVMe, staging buffers included, when each GPU gives up ``moved``."""
        if device == "none":
            return 0, 0
        # Pinned: gradients come down and parameters go up in buckets.
        staging = self.buckets * self.bucket * (self.preset.gradient_bytes + self.preset.parameter_bytes)
        if device == "cpu":
            return self.local * (moved + staging), 0
        # DeepSpeed's defaults: 5 buffers of 1e8 parameters, 4 of as many optimizer states.
        buffers = 10**8 * (5 * self.preset.parameter_bytes + 4 * self.preset.optimizer_bytes)
        return self.local * (staging + min(buffers, moved)), self.local * moved

    def _seconds(self, stage: int, traffic: int, optimizer: str, param: str, moved: int) -> float:
        """Seconds a step for traffic and the host's update, one after the other."""
        speed, preset = self.bandwidths, self.preset
        network = speed.network if self.gpus <= self.local else speed.network_between_hosts
        seconds = traffic * preset.parameter_bytes / network
        share = self.parameters if stage == 0 else -(-self.parameters // self.gpus)
        if optimizer != "none":  # gradients down, parameters up, and the update
            seconds += share * (preset.gradient_bytes + preset.parameter_bytes) / speed.pcie
            seconds += share * self.local / speed.cpu_adam
        if param != "none":  # fetched for forward and for backward
            seconds += 2 * share * preset.parameter_bytes / speed.pcie
        if optimizer == "nvme":  # states are read and written, parameters read twice
            seconds += self.local * (2 * moved + 2 * share * preset.parameter_bytes) / speed.nvme
        return seconds


def _name(stage: int, offload_optimizer: str, offload_param: str) -> str:
    place = {"none": "", "cpu": "CPU", "nvme": "NVMe"}[offload_optimizer]
    if not place:
        return STAGE_NAMES[stage]
    what = "optimizer" if offload_param == "none" else "all states"
    return f"{STAGE_NAMES[stage]} + {what} on {place}"
