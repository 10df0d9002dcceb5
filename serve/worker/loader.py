"""Makes one rank's model: built, cut, filled with its slices, its linear layers packed, its attention paged."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from checkpoint.dtypes import dtype_name
from serve.config import ServerConfig
from serve.engine.executor import ModelFacts
from serve.errors import ConfigError
from serve.model.angles import turn_by_own_lengths
from serve.model.attention import Backend, LayerCache, StepState
from serve.model.checks import check_dtype, check_max_model_len, check_quantization, extended_positions, length_rule
from serve.model.experts import cut_experts, deals_out_experts
from serve.model.families import Family, head_cut, head_dim
from serve.model.filling import Filler
from serve.model.fit import given_of
from serve.model.heads import KEY, HeadCut, check_pipeline_parallel, check_tensor_parallel
from serve.model.kernels.build import built_for
from serve.model.last_layer import compute_what_is_read
from serve.model.lean import call_leaves_directly
from serve.model.load import Blueprint, build_on_meta, choose_dtype, eos_ids, read_config
from serve.model.narrow_head import NarrowHead
from serve.model.pretrained import vocabulary_rows
from serve.model.shards import ShardOf
from serve.model.stages import keep_stage, layers_of
from serve.types import LengthRule
from serve.worker import complete, gpus
from serve.worker.autotp import shard, vocabulary_widths
from serve.worker.computing import (
    captures_on_cpu,
    choose_attention,
    choose_linear,
    compute_between_products,
    load_kernels,
    sizes_to_capture,
)
from serve.worker.device_faults import weights_that_do_not_fit
from serve.worker.finite import check_weights
from serve.worker.kv_cache import allocate, cache_dtype, enlarge
from serve.worker.parallel import Ranks
from serve.worker.products import ProductMaker
from serve.worker.sampling.backend import SamplingBackend
from serve.worker.sampling.sampler import choose_sampling
from serve.worker.sizing import Blocks, choose_blocks, few_blocks, is_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """One rank's model, ready to run steps."""

    body: nn.Module
    """transformers' base model: ids and positions to last hidden states. Of a stage that is not the last, to those behind its
    last layer; one that is not the first waits in each call for those before its first."""
    head: nn.Module
    """Hidden states [R, hidden] to this rank's logits [R, vocabulary columns]; only the last stage has it."""
    head_widths: tuple[int, ...]
    """Vocabulary columns of each rank."""
    state: StepState
    caches: list[LayerCache]
    """Every layer's keys and values."""
    facts: ModelFacts
    device: torch.device
    sampling: SamplingBackend
    graph_sizes: tuple[int, ...]
    """Rows of the decoding steps that are captured, ascending; none where steps are not captured."""
    filler: Filler
    """Reads the weights of another checkpoint of the same shapes."""
    settle: Callable[[], None]
    """To be called once those took the places of the weights before."""
    survey: Survey
    """What the checkpoint was found to be."""
    kernels: ctypes.CDLL | None = None
    """The CPU kernels, where they apply."""
    narrow: NarrowHead | None = None
    """What may find the likeliest tokens in place of the head, once it is made."""
    steps_bytes: int = 0
    """What captured steps and the largest step take of a device beside weights and blocks, where that was tried."""

    @property
    def stored(self) -> frozenset[str]:
        """The checkpoint's names of the tensors that the model takes, all ranks' parts together."""
        return self.survey.blueprint.stored


class Stopwatch:
    """Seconds by phase of the load."""

    def __init__(self, earlier: tuple[tuple[str, float], ...] = ()) -> None:
        self.phases: list[tuple[str, float]] = list(earlier)
        self._since = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.phases.append((phase, now - self._since))
        self._since = now


def load_rank(
    config: ServerConfig,
    rank: int,
    device: torch.device,
    join: Callable[[], Ranks],
    watch: Stopwatch,
    *,
    beside: int = 0,
    num_blocks: int | None = None,
    trial: Callable[[RankModel, Ranks], int] | None = None,
) -> tuple[RankModel, Ranks]:
    """Load this rank's part of the configured checkpoint.

    ``join`` is called after everything that one rank can find wrong by itself has been checked, so that a bad checkpoint is
    refused without waiting for the others. Rank 0 alone reads every byte for the hashes; the others wait for it there.

    Args:
        beside: bytes that another model's keys and values of one block take on this rank.
        num_blocks: how many blocks there are, where that was chosen for another model.
        trial: what steps take of the device beside weights and blocks; asked before those are counted, of a model with few.

    Raises:
        ConfigError: the checkpoint, the family or a number of ranks is at fault.
    """
    device = gpus.numbered(device)
    with opened(config, everything=rank == 0) as checkpoint:
        plan, step = survey(checkpoint, config, device), checkpoint.step
        ranks = join()
        kernels, linear, filler = _read_weights(checkpoint, plan, config, ranks, device, watch)
    model = plan.blueprint.model
    tried = trial if num_blocks is None and is_measured(config, device) else None
    head, narrow = _heads(model, config, ranks, kernels, filler)
    count = partial(choose_blocks, plan, config, ranks, device, beside, promised_bytes=_promised(filler, narrow))
    blocks = few_blocks(plan, config, ranks) if tried else count(num_blocks)
    ranks.share(kernels)
    attention, backend = choose_attention(device, kernels, plan.cache_dtype, captured=captures_on_cpu(config, device))
    caches = _blank(plan, blocks, config, ranks, device, keys_by_position=backend.keys_by_position)
    state = _with_cache(plan, caches, ranks, backend)
    watch.lap("cache")
    facts = _facts(plan, blocks, config.cache.block_tokens, device, (attention, linear, built_for(kernels)))
    call_leaves_directly(model)
    rank_model = RankModel(
        sampling=choose_sampling(device, kernels),
        graph_sizes=sizes_to_capture(config, plan.family, plan.length_rule, model, device, attention, ranks),
        body=model.base_model,
        head=head,
        narrow=narrow,
        head_widths=vocabulary_widths(plan.vocab_size, config.model.tensor_parallel_size),
        state=state,
        caches=caches,
        facts=dataclasses.replace(facts, checkpoint_step=step, load_seconds=tuple(watch.phases)),
        device=device,
        filler=filler,
        settle=partial(complete.settle, model, plan.family, ranks, whole=plan.whole_experts),
        survey=plan,
        kernels=kernels,
    )
    if tried is not None:
        rank_model = with_blocks(rank_model, config, ranks, count(None, steps_bytes=tried(rank_model, ranks)))
    return rank_model, ranks


def _heads(
    model: PreTrainedModel, config: ServerConfig, ranks: Ranks, kernels: ctypes.CDLL | None, filler: Filler
) -> tuple[nn.Module, NarrowHead | None]:
    """What computes the logits on the last stage, and what may be copied of it."""
    head = complete.whole_head(model) if ranks.stage.is_last else nn.Identity()
    return head, NarrowHead.of(head, kernels, filler.num_bytes) if config.kernels.narrow_head else None


def _promised(filler: Filler, narrow: NarrowHead | None) -> int:
    """What weights will take in memory of their own when the model has served for a while."""
    return filler.waiting_bytes + (0 if narrow is None else narrow.num_bytes)


def with_blocks(model: RankModel, config: ServerConfig, ranks: Ranks, blocks: Blocks) -> RankModel:
    """The model with other KV blocks, all zeros, in place of those it has.

    Args:
        config: what it was loaded by, as are ``ranks``.
    """
    by_position = model.caches[0].keys_by_position
    enlarge(model.caches, _blank(model.survey, blocks, config, ranks, model.device, keys_by_position=by_position))
    most = min(model.survey.max_model_len, blocks.count * model.facts.block_tokens)
    facts = dataclasses.replace(model.facts, num_blocks=blocks.count, max_model_len=most, cache_memory=blocks.memory)
    return dataclasses.replace(model, facts=facts, steps_bytes=blocks.steps_bytes)


def _blank(
    plan: Survey, blocks: Blocks, config: ServerConfig, ranks: Ranks, device: torch.device, *, keys_by_position: bool
) -> list[LayerCache]:
    """The blocks of every layer of this rank, all zeros."""
    return allocate(
        layers=ranks.stage.layers(plan.layers).width,
        num_blocks=blocks.count,
        kv_heads=blocks.kv_heads,
        head_dim=head_dim(plan.model_config),
        block_tokens=config.cache.block_tokens,
        dtype=plan.cache_dtype,
        device=device,
        keys_by_position=keys_by_position,
    )


def _with_cache(plan: Survey, caches: list[LayerCache], ranks: Ranks, backend: Backend) -> StepState:
    """Put the cache and all that ranks exchange into a model whose weights are there."""
    model = plan.blueprint.model
    first = ranks.stage.layers(plan.layers).begin
    state = complete.page_attention(
        model, plan.family, caches, backend, plan.heads, ranks.rank, plan.max_model_len, first_layer=first
    )
    if ranks.stage.is_last and backend.writes_alone and caches[0].values.device.type == "cpu":
        compute_what_is_read(list(layers_of(model, plan.family))[-1], state)
    if plan.length_rule is not None:
        turn_by_own_lengths(model, plan.length_rule, state)
    complete.sum_norms(model, plan.family, plan.heads, ranks)
    complete.sum_embedding(model, ranks)
    complete.sum_experts(model, plan.family, ranks, whole=plan.whole_experts)
    complete.settle(model, plan.family, ranks, whole=plan.whole_experts)
    if plan.family.scaled_embedding and ranks.stage.is_first:
        complete.scale_embedding(model)
    return state


def _facts(
    plan: Survey, blocks: Blocks, block_tokens: int, device: torch.device, computing: tuple[str, str, str]
) -> ModelFacts:
    """What the engine is told of the model and its cache. ``computing``: what computes attention and linear layers, and how."""
    return ModelFacts(
        family=plan.family.name,
        vocab_size=plan.vocab_size,
        max_model_len=min(plan.max_model_len, blocks.count * block_tokens),
        eos_ids=plan.eos_ids,
        dtype=dtype_name(plan.blueprint.dtype),
        device=device.type,
        num_blocks=blocks.count,
        block_tokens=block_tokens,
        num_parameters=plan.blueprint.num_parameters,
        checkpoint_step=None,
        length_rule=plan.length_rule,
        cache_memory=blocks.memory,
        gpus=(gpus.uuid_of(device),) if device.type == "cuda" else (),
        attention=computing[0],
        linear=computing[1],
        kernels=computing[2],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one process can know of a checkpoint before any weight is read."""

    family: Family
    model_config: PretrainedConfig
    blueprint: Blueprint
    cache_dtype: torch.dtype
    """What keys and values are kept in."""
    heads: HeadCut
    max_model_len: int
    length_rule: LengthRule | None
    vocab_size: int
    """Rows of the whole embedding; a rank's own model has fewer once it is cut."""
    eos_ids: tuple[int, ...]
    whole_experts: bool
    """Whether each rank has some of the experts, not a part of each."""

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return int(self.model_config.num_hidden_layers)


def survey(checkpoint: Checkpoint, config: ServerConfig, device: torch.device) -> Survey:
    """Find everything wrong with a checkpoint that can be found without memory for it and without the other ranks.

    Raises:
        ConfigError: the checkpoint, the family or an option is at fault.
    """
    family, model_config = read_config(checkpoint)
    heads = head_cut(model_config, config.model.tensor_parallel_size)
    check_tensor_parallel(
        heads.query,
        heads.shared,
        heads.size,
        multiple=family.head_blocks,
        repeats=any(KEY in kinds for kinds in family.rows.values()),
    )
    check_pipeline_parallel(int(model_config.num_hidden_layers), config.model.pipeline_parallel_size)
    dtype = choose_dtype(checkpoint, config.model.dtype)
    check_dtype(dtype_name(dtype), device.type)
    check_quantization(config.model.quantization, device.type)
    kept_in = cache_dtype(config.cache.kv_cache_dtype, device.type, dtype)
    limit = getattr(model_config, "max_position_embeddings", None)
    most = extended_positions(limit, {"rope_parameters": getattr(model_config, "rope_parameters", None)})
    max_model_len = check_max_model_len(config.model.max_model_len, limit, most)
    blueprint = build_on_meta(checkpoint, family, model_config, dtype)
    if family.scaled_embedding:
        complete.plain_embedding(blueprint.model)
    rows = vocabulary_rows(blueprint.model)
    return Survey(
        family=family,
        model_config=model_config,
        blueprint=blueprint,
        cache_dtype=kept_in,
        heads=heads,
        max_model_len=max_model_len,
        length_rule=length_rule(model_config),
        vocab_size=rows,
        eos_ids=eos_ids(rows, checkpoint.generation_config, checkpoint.config),
        whole_experts=deals_out_experts(config.model.experts, family, blueprint.model, config.model.tensor_parallel_size),
    )


def _read_weights(
    checkpoint: Checkpoint, plan: Survey, config: ServerConfig, ranks: Ranks, device: torch.device, watch: Stopwatch
) -> tuple[ctypes.CDLL | None, str, Filler]:
    """Cut the model for this rank and fill it.

    Returns:
        The CPU kernels, where they apply; what computes linear layers; what can fill the model again.
    """
    model, dtype = plan.blueprint.model, plan.blueprint.dtype
    shards: dict[str, ShardOf] = {}
    if ranks.size > 1:
        shards |= shard(model, plan.family, plan.heads, ranks.rank, ranks.size, ranks.group)
        shards |= cut_experts(model, plan.family, ranks.size, ranks.rank, whole=plan.whole_experts)
    if ranks.stage.count > 1:
        keep_stage(model, plan.family, ranks.stage, device, lambda shape: ranks.receive(shape, dtype, device))
    watch.lap("build")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    captured = captures_on_cpu(config, device)
    kernels = None if captured else load_kernels(config.kernels.cache_dir, ranks.number, device, dtype)
    linear, packer = choose_linear(config, device, dtype, kernels, captured=captured)
    later = config.kernels.pack_later and device.type == "cpu"
    maker = ProductMaker(packer, ranks, model, plan.family, whole_experts=plan.whole_experts)
    filler = Filler(model, shards, device, maker, later=later)
    free = gpus.free_bytes(device)
    try:
        filler.fill(checkpoint, plan.blueprint)
    except torch.OutOfMemoryError as error:
        needed = plan.blueprint.num_parameters * dtype.itemsize
        raise ConfigError(
            weights_that_do_not_fit(config, gpus.name_of(device), weight_bytes=needed, free_bytes=free, itemsize=dtype.itemsize)
        ) from error
    compute_between_products(model, device, kernels)
    watch.lap("weights")
    return kernels, linear, filler


def rehearse(config: ServerConfig, device: torch.device) -> None:
    """All of a load that needs neither the model's memory nor other ranks, and a look at every weight.

    Raises:
        ConfigError: the checkpoint, the family or an option is at fault, or a weight is NaN or infinite.
    """
    with opened(config, everything=False) as checkpoint:
        blueprint = survey(checkpoint, config, device).blueprint
        try:
            checkpoint.look_through(
                lambda file: check_weights(checkpoint, blueprint.stored, blueprint.dtype, file=file),
                hashes=_asks_for_hashes(config.model.verify, checkpoint),
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error


def opened(config: ServerConfig, *, everything: bool) -> Checkpoint:
    """The configured checkpoint; ``everything``: also its bytes are proved, as far as ``model.verify`` asks for it."""
    try:
        checkpoint = open_checkpoint(config.model.path, given=given_of(config.model))
        if not everything or not _asks_for_hashes(config.model.verify, checkpoint):
            return checkpoint
        with checkpoint:
            return open_checkpoint(checkpoint.path, verify="sha256", given=given_of(config.model))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _asks_for_hashes(verify: str, checkpoint: Checkpoint) -> bool:
    """Whether ``model.verify`` has every byte compared with the manifest: ``auto`` does where there is one."""
    return verify == "sha256" or (verify == "auto" and checkpoint.manifest is not None)
