"""Bytes a run holds, by phase: what DeepSpeed 0.19 and torch allocate for a configuration, counted from the model's facts.

Per rank and phase; the busiest phase counts. On a CPU everything is the host's memory. Constants were measured (see
``benchmarks/forecast.py``, which compares every kind of configuration with a real run).

P trained elements   F frozen ones   N ranks that share the state   w bytes of a weight that computes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from finetune.forecast.facts import ModelFacts
from finetune.forecast.layout import Layout
from finetune.forecast.replay import replay
from finetune.optimizers.kind import UpdateSizes
from finetune.optimizers.kinds import KINDS

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

PROCESS_BYTES: Final = {"cpu": 285 * _MIB, "cuda": 2200 * _MIB}
"""Host memory of one rank before it has a model, pages of shared files not counted: Python, torch, DeepSpeed, transformers."""
SHARED_FILES_BYTES: Final = {"cpu": 115 * _MIB, "cuda": 900 * _MIB}
"""Pages of libraries, mapped by all ranks in common."""
WRITER_BYTES: Final = 45 * _MIB
"""What rank 0 has more than the others: log, events, figures, the shard it writes."""
KERNELS_BYTES: Final = 30 * _MIB
"""Scratch memory and thread stacks of a CPU's matrix kernels."""
CONTEXT_BYTES: Final = 700 * _MIB
"""Device memory of a CUDA context with its libraries."""
NCCL_BYTES: Final = 400 * _MIB
"""Device memory of NCCL's channels, with more than one rank."""
DEVICE_SLACK: Final = 1.04
"""What torch's caching allocator on a GPU holds more than its tensors, in segments that grow (``machine.device_memory``)."""
ADAPTER_LIBRARY_BYTES: Final = 20 * _MIB
"""peft, imported by each rank."""
LIVE_PARAMETERS: Final = 1_000_000_000
"""Elements that ZeRO-3 leaves whole between uses, at most: DeepSpeed's stage3_max_live_parameters."""
JOINED_ELEMENTS: Final = 500_000_000
"""Gradients of fewer are joined with those of another group to be sent: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE."""

_NORM_ELEMENTS: Final = 250_000_000
"""ZeRO-3 takes the norm of an offloaded gradient in fp64, of so many elements at once: DeepSpeed's _constant_buffered_norm2."""
_SWAP_BUFFERS: Final = 5
_MOST_SUB_GROUP: Final = 50_000_000
_PARAMETER_BUFFERS: Final = 6
"""An optimizer's and the parameters' buffers on their way from and to NVMe: a few of the largest part's size."""

Phase = dict[str, int]
"""Item -> bytes; the items of one side (device or host) in one phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one rank holds at its busiest."""

    device: Mapping[str, int] = field(default_factory=dict)
    """Item -> bytes on the device; empty on a CPU, whose device is the host."""
    device_phase: str = ""
    host: Mapping[str, int] = field(default_factory=dict)
    host_phase: str = ""
    nvme_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def need_of(facts: ModelFacts, layout: Layout) -> Need:
    """The busiest moment of one rank, on its device and in the host's memory."""
    phases = _phases(facts, layout)
    if layout.device == "cpu":
        merged = {name: _merge(device, host) for name, (device, host) in phases.items()}
        name, items = _busiest(merged.items())
        return Need(host=_merge(items, {"kernels": KERNELS_BYTES}), host_phase=name, nvme_bytes=_nvme(facts, layout))
    on_device = {name: _merge(device, _context(layout)) for name, (device, _) in phases.items()}
    on_host = {name: host for name, (_, host) in phases.items()}
    device_phase, device = _busiest(on_device.items())
    host_phase, host = _busiest(on_host.items())
    slack = round((DEVICE_SLACK - 1) * (sum(device.values()) - sum(_context(layout).values())))
    return Need(
        device={**device, "fragmentation": slack},
        device_phase=device_phase,
        host=host,
        host_phase=host_phase,
        nvme_bytes=_nvme(facts, layout),
    )


def _busiest(phases: Iterable[tuple[str, Phase]]) -> tuple[str, Phase]:
    return max(phases, key=lambda phase: sum(phase[1].values()))


def _merge(*parts: Mapping[str, int]) -> Phase:
    merged: Phase = {}
    for part in parts:
        for name, size in part.items():
            merged[name] = merged.get(name, 0) + size
    return {name: size for name, size in merged.items() if size > 0}


def _context(layout: Layout) -> Phase:
    return {"CUDA context": CONTEXT_BYTES, "NCCL": NCCL_BYTES if layout.ranks > 1 else 0}


def _phases(facts: ModelFacts, layout: Layout) -> dict[str, tuple[Phase, Phase]]:
    """Phase -> what it holds on the device and in the host's memory."""
    process = {"process": PROCESS_BYTES[layout.device], "peft": ADAPTER_LIBRARY_BYTES if facts.frozen else 0}
    state_device, state_host = _state(facts, layout)
    step_device, step_host = _step(facts, layout)
    if layout.device == "cpu":
        backward, reduction, kept = _passing(facts, layout)
        backward_host: Phase = {}
    else:
        backward, backward_host = _backward(facts, layout)
        reduction, kept = _reduction(facts, layout), {}
    load_device, load_host = _load(facts, layout)
    return {
        "timing of layers": (_timing(facts, layout), process),
        "load": (load_device, _merge(process, load_host)),
        "backward pass": (_merge(state_device, backward), _merge(process, state_host, backward_host)),
        "reduction": (_merge(state_device, reduction), _merge(process, state_host)),
        "optimizer step": (_merge(state_device, step_device, kept), _merge(process, state_host, step_host)),
    }


def _sizes(facts: ModelFacts, layout: Layout) -> tuple[int, int, int]:
    """Trained and frozen elements of one pipeline stage, and one rank's share of the trained ones."""
    trained = -(-facts.trained // layout.pipeline)
    frozen = -(-facts.frozen // layout.pipeline)
    return trained, frozen, trained if layout.stage == 0 else -(-trained // layout.shares)


def _load(facts: ModelFacts, layout: Layout) -> tuple[Phase, Phase]:
    """Building and filling the model, then DeepSpeed's flat copy of it."""
    trained, frozen, share = _sizes(facts, layout)
    w = layout.weight_bytes
    reading = {"tensor being read": 8 * facts.largest}
    if layout.stage == 3:
        parts = {"weights": w * -(-(trained + frozen) // layout.shares)}
        return ({}, _merge(parts, reading)) if layout.parameters != "none" else (parts, reading)
    whole = {"weights": w * (trained + frozen)}
    flat = {"weights": w * (2 * trained + frozen), "fp32 weights": 4 * share}
    if layout.device == "cpu":
        return flat, {}
    return flat, _merge(whole, reading)


def _timing(facts: ModelFacts, layout: Layout) -> Phase:
    """The head, which is the largest of the layers that a pipeline times one by one, whole on every rank, before it is cut."""
    if not (layout.times_layers and layout.whole_logits):
        return {}
    # The logarithms of the probabilities, the loss's gradient by them, and that by the logits.
    return {
        "logits of the timed head": 3 * 4 * layout.tokens * facts.vocab,
        "weights": 2 * layout.weight_bytes * facts.vocab * facts.hidden,
    }


def _state(facts: ModelFacts, layout: Layout) -> tuple[Phase, Phase]:
    """What lies there during all of training."""
    trained, frozen, share = _sizes(facts, layout)
    w = layout.weight_bytes
    device: Phase = {}
    host: Phase = {}
    weights = w * (trained + frozen)
    if layout.stage == 3:
        weights = w * -(-(trained + frozen) // layout.shares)
    if layout.parameters == "none":
        device["weights"] = weights
    elif layout.parameters == "cpu":
        host["weights"] = weights
    # Without ZeRO the optimizer updates fp32 weights themselves. ZeRO-3 means to, too, and copies them, since it compares a
    # device with its name.
    master = 0 if layout.stage == 0 and w == 4 else 4 * share
    states = {"fp32 weights": master, "moments": 4 * _moments(facts, layout)}
    if layout.optimizer == "none":
        device |= states
    elif layout.optimizer == "cpu":
        # fp32 gradients for the host's optimizer go with its state.
        every = {**states, "gradients": 4 * share}
        host |= {name: round(size * layout.on_host) for name, size in every.items()}
        device |= {name: round(size * (1 - layout.on_host)) for name, size in every.items()}
        host["chosen rows"] = round(12 * layout.chosen * facts.matrices / layout.shares)
        if layout.stage < 3:
            host["copies for offload"] = w * share + w * facts.largest
            device["copies for offload"] = w * facts.largest
    else:
        host["swap buffers"] = _SWAP_BUFFERS * 4 * _sub_group(facts, layout)
    if layout.parameters == "nvme":
        host = _merge(host, {"swap buffers": _PARAMETER_BUFFERS * w * -(-facts.largest // layout.shares)})
    if layout.sums_in_fp32:
        device["gradients in fp32"] = 4 * trained
    if layout.stage == 3:
        flat = {"gradients": w * share}
        if layout.optimizer == "none":
            device = _merge(device, flat)
        else:
            host = _merge(host, flat)
    return device, host


def moment_elements(facts: ModelFacts, algorithm: str) -> tuple[int, int]:
    """Elements of all moments of a whole model: those that are spread as the weights are, and those every rank has."""
    kind = KINDS[algorithm]
    spread = len(kind.state) * (facts.trained - facts.matrices) + len(kind.keys_of(matrix=True)) * facts.matrices
    return spread, facts.whole


def _moments(facts: ModelFacts, layout: Layout) -> int:
    """Elements of one rank's moments."""
    spread, whole = moment_elements(facts, layout.algorithm)
    return -(-spread // (layout.pipeline * (1 if layout.stage == 0 else layout.shares))) + -(-whole // layout.pipeline)


def _sub_group(facts: ModelFacts, layout: Layout) -> int:
    """Elements an optimizer on NVMe reads, updates and writes at once."""
    return max(-(-facts.largest // layout.shares), min(_MOST_SUB_GROUP, _sizes(facts, layout)[2]))


def _passing(facts: ModelFacts, layout: Layout) -> tuple[Phase, Phase, Phase]:
    """On a CPU, what comes and goes: in a backward pass, in the reduction at its end, and what stays until the next."""
    seen = replay(facts.trace, layout)
    trained, _, share = _sizes(facts, layout)
    w = layout.weight_bytes
    in_flight = min(layout.pipeline, layout.accumulation)

    def part(size: int) -> int:
        """The first stage holds as many micro-batches as there are stages, each of a stage's part of the layers."""
        return size * in_flight // layout.pipeline

    whole = w * trained if layout.adds_whole else 0
    backward = {
        "activations": part(seen.activations),
        "heap gaps": part(seen.gaps),
        "gathered weights": seen.gathered,
        "gradients": min(seen.gradients, whole),
        "reduce bucket": seen.bucket,
    }
    kept = {"heap gaps": part(seen.gaps_at_end)}
    reduction = {**kept, "gradients": min(seen.gradients_at_end, whole), "reduce bucket": seen.bucket_at_end}
    in_bucket = w * min(layout.bucket, trained)
    if layout.sums_in_fp32:
        reduction = _merge(kept, _reduction(facts, layout))
    elif layout.adds_whole:
        # ZeRO-1 makes a bucket beside them (``finetune.engines.buckets``), moves them to it one by one, reduces them where they
        # lie and copies this rank's part, for which they have left room; without ZeRO a copy is sent.
        bucket = in_bucket if layout.stage == 1 else 0
        copied = in_bucket if layout.stage == 0 and layout.shares > 1 else 0
        reduction = _merge(kept, {"gradients": w * trained, "reduce bucket": bucket, "reduced copy": copied})
    elif layout.stage == 3:
        reduction["reduced copy"] = 2 * in_bucket
    elif layout.optimizer == "none":
        before = w * share if layout.accumulation > 1 else 0
        backward["gradients"] += before
        reduction["gradients"] += before + w * share
    elif layout.accumulation > 1:
        for phase in (backward, reduction):
            phase["added gradients"] = w * share
    return _merge(backward), _merge(reduction), _merge(kept)


def _backward(facts: ModelFacts, layout: Layout) -> tuple[Phase, Phase]:
    """On a GPU the last micro-batch of a step: activations, gradients as they come, buckets in which they are reduced."""
    trained, _, share = _sizes(facts, layout)
    w = layout.weight_bytes
    if layout.sums_in_fp32:
        return {"activations": _activations(facts, layout)[0], "gradients": w * trained}, {}
    in_bucket = min(layout.bucket, trained)
    # Twice where communication overlaps.
    in_place = layout.stage in (1, 2)  # buckets of ZeRO-1 and 2 are reduced where they lie, see ``finetune.engines.buckets``
    bucket = in_bucket * (2 if in_place and not layout.staged else 1)
    device: Phase = {"reduce bucket": w * bucket, "reduced copy": 0 if in_place else w * in_bucket}
    activations, host_inputs = _activations(facts, layout)
    host: Phase = {}
    if layout.checkpoint_on_cpu:
        host["block inputs"] = host_inputs
    device["activations"] = activations
    if layout.stage == 3:
        live = min(LIVE_PARAMETERS, trained + facts.frozen // layout.pipeline)
        if layout.shares > 1 or layout.parameters != "none":  # else DeepSpeed's whole weight is the part itself
            device["gathered weights"] = w * live
        if layout.shares > 1:  # alone, what is joined is not sent in another type
            device["reduced copy"] += w * in_bucket
        if layout.optimizer != "none":  # a gradient is copied back for its norm, in the stream of the reduction
            largest = -(-facts.largest // layout.shares)
            device["norm of a gradient"] = w * largest + 8 * min(largest, _NORM_ELEMENTS)
    elif layout.stage == 0:
        device["gradients"] = w * trained
    elif layout.optimizer == "none":
        device["gradients"] = w * share
        if layout.stage == 1 and layout.accumulation > 1:
            device["gradients"] += w * trained
    elif layout.accumulation > 1:
        device["gradients"] = w * trained if layout.stage == 1 else 0
        host["added gradients"] = w * share
    return device, host


def _reduction(facts: ModelFacts, layout: Layout) -> Phase:
    """Between the last backward pass and the update, where gradients were added up in fp32: their copy on its way to others."""
    if not layout.sums_in_fp32:
        return {}
    trained, _, _ = _sizes(facts, layout)
    joined = 4 if facts.largest_group // layout.pipeline <= JOINED_ELEMENTS else 0
    rounded = layout.sent_bytes if layout.sent_bytes < 4 else 0
    copied = (joined + rounded) * trained if layout.shares > 1 else 0
    return {"gradients": layout.weight_bytes * trained, "reduced copy": copied}


def _activations(facts: ModelFacts, layout: Layout) -> tuple[int, int]:
    """Bytes of activations on the device, and of block inputs that wait in the host's memory."""
    total = facts.activation_bytes
    inputs = facts.saved_inputs_bytes if layout.checkpoint_on_cpu else 0
    if layout.pipeline > 1:
        # The first stage holds as many micro-batches as there are stages, of a stage's part of the layers.
        in_flight = min(layout.pipeline, layout.accumulation)
        total = total * in_flight // layout.pipeline
    return max(0, total - inputs), inputs


def mean_in_flight(layout: Layout) -> float:
    """Micro-batches a pipeline stage holds on average, as a share of what the first one does: each later one holds one less."""
    first = min(layout.pipeline, layout.accumulation)
    held = [min(layout.pipeline - stage, layout.accumulation) for stage in range(layout.pipeline)]
    return sum(held) / (first * layout.pipeline)


def _step(facts: ModelFacts, layout: Layout) -> tuple[Phase, Phase]:
    """The update: gradients in fp32, and what the optimizer computes with."""
    trained, _, share = _sizes(facts, layout)
    w = layout.weight_bytes
    group = min(share, -(-facts.largest_group // (layout.pipeline * layout.shares)))
    kind, sizes = KINDS[layout.algorithm], _update_sizes(facts, layout, share)
    scratch, turn = kind.scratch(sizes), {"whole matrices": kind.device_scratch(sizes)}
    if layout.sums_in_fp32:
        return {"gradients": w * trained, "optimizer's scratch": scratch, **turn}, {}
    if layout.stage == 3:
        # Of 16 bits they are laid end to end first.
        work = {"gradients in fp32": (4 + (w if w == 2 else 0)) * share, "optimizer's scratch": scratch}
        kept = {"reduce bucket": w * min(layout.bucket, trained)} if layout.device == "cpu" else {}
        if layout.optimizer == "none":
            return _merge(work, kept, turn), {}
        return _merge(kept, turn), {"optimizer's scratch": scratch}
    if layout.optimizer == "none":
        return {
            "gradients": w * share,
            "gradients in fp32": (4 + (w if w == 2 else 0)) * group,
            "optimizer's scratch": scratch,
            **turn,
        }, {}
    return turn, {"optimizer's scratch": scratch}


def _update_sizes(facts: ModelFacts, layout: Layout, share: int) -> UpdateSizes:
    def part(elements: int) -> int:
        return min(share, -(-elements // (layout.pipeline * layout.shares)))

    whole_rows = -(-facts.largest_matrix // layout.shares) if layout.stage == 3 else min(share, facts.largest_matrix)
    return UpdateSizes(
        share=share,
        group=part(facts.largest_group),
        others=part(facts.trained - facts.matrices),
        parameter=facts.largest,
        matrix=facts.largest_matrix,
        matrix_part=whole_rows,
        flat=layout.stage != 0,
        chosen=layout.chosen,
    )


def _nvme(facts: ModelFacts, layout: Layout) -> int:
    """Bytes of this rank's swap files: fp32 weights and moments, gradients, and the weights that compute."""
    _, _, share = _sizes(facts, layout)
    needed = 0
    if layout.optimizer == "nvme":
        needed += (4 + 4) * share + 4 * _moments(facts, layout)
    if layout.parameters == "nvme":
        needed += layout.weight_bytes * -(-facts.total // (layout.pipeline * layout.shares))
    return needed
