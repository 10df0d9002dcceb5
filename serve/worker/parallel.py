"""Tensor parallelism by DeepSpeed's AutoTP layers, on models without memory. The only deepspeed import of ``serve``."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from serve.errors import ConfigError
from serve.model.experts import cut_experts
from serve.model.families import Family, Rows
from serve.model.heads import HeadCut, Piece, Stage
from serve.model.localise import cut_by_hand, localise
from serve.model.recording import anew
from serve.model.shards import ShardOf
from serve.worker.progress import Progress
from serve.worker.shared import SharedMemory

if TYPE_CHECKING:
    from deepspeed.module_inject.autotp_config import TPLayerSpec

_LOG = logging.getLogger(__name__)
_ONLY_STAGE: Final = Stage()


class Ranks:
    """This rank's place among the ranks, and what they exchange: those of its own stage, and stages one with the next."""

    def __init__(
        self,
        rank: int,
        size: int,
        progress: Progress | None = None,
        memory: int | None = None,
        *,
        stage: Stage = _ONLY_STAGE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """The process group of all ranks is there already, for more than one.

        Args:
            rank: place in the stage.
            size: ranks of each stage.
            progress: told of each exchange before it begins.
            memory: descriptor of a memory file that all ranks of the stage have, empty at first.
            group: the ranks of the stage; ``None`` where those are all.
        """
        self.rank = rank
        self.size = size
        self.stage = stage
        self.group = group
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._progress = progress or Progress()
        self._memory = memory
        self._shared: SharedMemory | None = None

    @property
    def number(self) -> int:
        """This rank among all ranks, stage after stage."""
        return self.stage.number * self.size + self.rank

    @property
    def count(self) -> int:
        """Ranks of all stages."""
        return self.stage.count * self.size

    @property
    def answers(self) -> bool:
        """Whether this rank draws the tokens and tells the server: the first one of the last stage."""
        return self.rank == 0 and self.stage.is_last

    def share(self, kernels: ctypes.CDLL | None) -> None:
        """From now on, let a stage's ranks exchange activations through memory, if all ranks can, and not by the process group.

        Once is enough.

        Args:
            kernels: what does it; ``None`` where this rank has none.
        """
        if self.size == 1 or self._memory is None or self._shared is not None:
            return
        shared: SharedMemory | None = None
        if kernels is not None:
            try:
                shared = SharedMemory(kernels, self._memory, self.rank, self.size)
            except OSError as error:
                _LOG.warning("rank %d exchanges activations by sockets, which is slower: %s", self.rank, error)
        if self.smallest(int(shared is not None)):
            self._shared = shared

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            anew(self._sum, tensor)
        return tensor

    def _sum(self, tensor: Tensor) -> None:
        self._progress.mark()
        if self._shared is not None and self._shared.takes(tensor):
            self._shared.sum_(tensor)
        else:
            dist.all_reduce(tensor, group=self.group)

    def gather_columns(self, tensor_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """The stage's rank 0 gets its ranks' columns side by side, [R, sum of widths]; the others get ``None``."""
        if self.size == 1:
            return tensor_RV
        self._progress.mark()
        if self._shared is not None:
            return self._shared.gather_columns(tensor_RV, widths)
        # gloo wants equal shapes; the odd vocabulary's narrower shards travel with padding.
        padded = nn.functional.pad(tensor_RV, (0, max(widths) - tensor_RV.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        dist.gather(padded, parts, dst=self.number - self.rank, group=self.group)
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1) if parts else None

    def numbers_of_first(self, numbers: list[int], device: torch.device) -> list[int]:
        """The numbers of the rank that answers, on every rank; of what the others bring, only how many they are counts.

        Part of a step.
        """
        self._progress.mark()
        if self._shared is not None and self.stage.count == 1:
            return self._shared.numbers_of_first(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.broadcast(tensor, src=self.count - self.size)
        return [int(number) for number in tensor.tolist()]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same rank of the stage before has handed on: the beginning of this stage's part of a step."""
        self._progress.reach(self.stage.number, self.stage.count)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=self.number - self.size)
        self._progress.mark()
        return tensor

    def hand_on(self, tensor: Tensor) -> None:
        """Send a tensor to the same rank of the next stage, which takes it when it comes to this step."""
        if self._sent is not None:
            self._sent[0].wait()
        kept = tensor.contiguous()  # must stay as it is until it was sent
        work = dist.isend(kept, dst=self.number + self.size)
        assert work is not None, "this rank is one of those that send"
        self._sent = work, kept

    def end_step(self) -> None:
        """Say to whom watches that this rank is through with a step that has stages."""
        if self.stage.count > 1:
            self._progress.reach(self.stage.count, self.stage.count)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank of every stage."""
        if self.count == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        with self._progress.with_others():
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._control_group())
        return int(tensor)

    def all_say(self, yes: bool, device: torch.device) -> bool:
        """Whether every rank of every stage says yes. Of one stage it is part of a step, as sums are, and as quick as they."""
        if self.stage.count > 1:
            return self.smallest(int(yes)) == 1
        return int(self.sum_(torch.tensor(float(yes), device=device))) == self.size

    def told_by_first(self, text: str, stage: int = 0) -> str:
        """The text of a stage's first rank, on every rank of every stage; what the others bring counts for nothing."""
        if self.count == 1:
            return text
        first = stage * self.size
        encoded = text.encode() if self.number == first else b""
        group, count = self._control_group(), torch.tensor(len(encoded), dtype=torch.int64)
        with self._progress.with_others():
            dist.broadcast(count, src=first, group=group)
            letters = torch.tensor(list(encoded or bytes(int(count))), dtype=torch.uint8)
            dist.broadcast(letters, src=first, group=group)
        return bytes(letters.tolist()).decode()

    def _control_group(self) -> dist.ProcessGroup | None:
        """Small integers travel over gloo, whatever carries the activations."""
        if dist.get_backend() == "gloo":
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def limit_exchanges(self, seconds: float) -> None:
        """From now on a rank ends when an exchange of GPUs takes so long; until now others may have had much to load.

        An exchange in a captured step is not seen by this limit: there, the server's own limit of a step ends the ranks.
        """
        if self.count > 1 and dist.get_backend() == "nccl":
            for group in dict.fromkeys((None, self.group)):  # of all ranks, and of the stage's
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(
    number: int,
    size: int,
    device: torch.device,
    rendezvous: Path | str,
    memory: int | None,
    timeout_seconds: float,
    progress: Progress,
    stages: int = 1,
) -> Ranks:
    """Meet the other ranks through a file that they all have open: no port is opened for it. ``memory`` is that of ``Ranks``.

    Rank ``number`` of all is one of the ``size`` of its stage: the first stage has the first ranks.
    Ranks of several nodes meet at ``tcp://HOST:PORT``, with ``/N`` behind it for rank 0, whose descriptor N listens there.
    The environment must hold LOCAL_RANK and DS_ACCELERATOR, which DeepSpeed reads.
    """
    count, stage = size * stages, Stage(number // size, stages)
    if count == 1:
        return Ranks(number, size, progress)
    group: dist.ProcessGroup | None = None
    with progress.with_others():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=_store(str(rendezvous), number, count, timedelta(seconds=timeout_seconds)),
            rank=number,
            world_size=count,
            timeout=timedelta(seconds=timeout_seconds),
        )
        if stages > 1:  # every rank makes the groups of all stages, in the same order
            groups = [dist.new_group(range(first, first + size)) for first in range(0, count, size)]
            group = groups[stage.number]
        if size > 1:
            _start_deepspeed_communication()
    return Ranks(number % size, size, progress, memory, stage=stage, group=group)


def _store(rendezvous: str, rank: int, size: int, timeout: timedelta) -> Store:
    if not rendezvous.startswith("tcp://"):
        return FileStore(rendezvous, size)
    place, _, listening = rendezvous.removeprefix("tcp://").partition("/")
    host, _, port = place.rpartition(":")
    descriptor = int(listening) if listening else None
    return TCPStore(
        host, int(port), size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True
    )


def _start_deepspeed_communication() -> None:
    """Let DeepSpeed's layers use the process group that exists already.

    Its shared-memory all-reduce stays off: its segments in /dev/shm outlive a killed rank, a frozen peer makes it spin for
    ever, and it has to be compiled first.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def shard(model: PreTrainedModel, family: Family, heads: HeadCut, ranks: Ranks) -> Mapping[str, ShardOf]:
    """Replace the layers of a model on the ``meta`` device by DeepSpeed's sharded ones, still on ``meta``.

    Head and input embedding are cut along the vocabulary, so that no rank holds the largest tensors whole.

    Returns:
        For each parameter name of the sharded model that a rank holds in part: which pieces of the whole are its own.

    Raises:
        ConfigError: the model cannot be cut like this.
    """
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import VocabParallelEmbedding

    by_hand = cut_by_hand(family, heads)
    group = ranks.group or dist.group.WORLD
    # DeepSpeed deals out whole key/value heads; where one is on several ranks, query heads are dealt out instead.
    counts = SimpleNamespace(num_key_value_heads=heads.unit, num_attention_heads=heads.query)
    try:
        auto = AutoTP(
            model,
            (),
            "",
            None,
            None,
            None,
            keep_module_on_host=True,
            partition_config=AutoTPConfig(
                tp_size=ranks.size, layer_specs=_specs(model, family, heads, by_hand), use_default_specs=False
            ),
            vocab_parallel_lm_head=True,
            model_config=counts,
            tp_grain_size=1,
            training_mode=False,
        )
        auto.set_tensor_parallel_config(ranks.size, group)
        auto.update_linear_policies()
        auto._replace_module(model)
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):  # not tied to the head, so AutoTP left it whole
            model.set_input_embeddings(VocabParallelEmbedding(embedding, group, name="input_embedding"))
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"model.tensor_parallel_size is {ranks.size}; this model cannot be cut so: {error}") from error
    shards = {
        name: _pieces(getattr(parameter, DS_AUTOTP_UC_META), ranks.rank)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if hasattr(parameter, DS_AUTOTP_UC_META)
    }
    shards |= localise(model, family, heads, by_hand, ranks.rank)
    return shards | cut_experts(model, family, ranks.size, ranks.rank)


def _specs(model: PreTrainedModel, family: Family, heads: HeadCut, by_hand: Rows) -> list[TPLayerSpec]:
    """What AutoTP cuts, and how."""
    from deepspeed.module_inject.autotp_config import PartitionType, TPLayerSpec

    def spec(names: Sequence[str], kind: PartitionType, **options: object) -> TPLayerSpec:
        patterns = [rf".*\b{re.escape(name)}\.weight$" for name in names]
        return TPLayerSpec(patterns=patterns, partition_type=kind, **options)

    joined = {name: kinds for name, kinds in family.rows.items() if len(kinds) > 1 and name not in by_hand}
    special = {*joined, *family.halves, *by_hand}
    specs = [spec(family.halves, PartitionType.COLUMN, shape=(2, -1), partition_dim=0)] if family.halves else []
    for name, kinds in joined.items():
        outputs, inputs = _shape_of(model, name)
        shape = (heads.widths(kinds, outputs), inputs)
        specs.append(spec((name,), PartitionType.COLUMN, shape=shape, partition_dim=0))
    row = list(family.row)
    if family.head_blocks > 1:
        joined_by, *row = row
        outputs, inputs = _shape_of(model, joined_by)
        widths = (inputs // family.head_blocks,) * family.head_blocks
        specs.append(spec((joined_by,), PartitionType.ROW, shape=(outputs, widths), partition_dim=1))
    specs.append(spec([name for name in family.column if name not in special], PartitionType.COLUMN))
    specs.append(spec(row, PartitionType.ROW))
    return specs


def _shape_of(model: nn.Module, name: str) -> tuple[int, int]:
    """(outputs, inputs) of the first linear layer whose path ends so: every layer's are the same."""
    module = next(module for path, module in model.named_modules() if path.endswith("." + name))
    outputs, inputs = module.get_parameter("weight").shape
    return outputs, inputs


class _Description(TypedDict):
    """What we read of DeepSpeed's own description of a shard (``DS_AUTOTP_UC_META``)."""

    original_shape: Sequence[int]
    replicated: bool
    partition_dim: int | None
    partition_sizes: Sequence[int]
    """Width of each rank's part."""
    sub_param_sizes: Sequence[int] | None
    """Widths of the fused parts, each of which is cut by itself; ``None`` where nothing is fused."""
    sub_param_shard_widths: Sequence[Sequence[int]]
    """The width of each rank's piece, for each fused part."""


def _pieces(meta: _Description, rank: int) -> ShardOf:
    """Read DeepSpeed's description of a shard."""
    full_shape = tuple(int(n) for n in meta["original_shape"])
    dim = meta["partition_dim"]
    if meta["replicated"] or dim is None:
        return ShardOf(full_shape=full_shape, dim=0, pieces=(Piece(0, full_shape[0]),))
    if meta["sub_param_sizes"]:
        pieces, offset = [], 0
        for size, widths in zip(meta["sub_param_sizes"], meta["sub_param_shard_widths"], strict=True):
            begin = offset + sum(widths[:rank])
            pieces.append(Piece(begin, begin + widths[rank]))
            offset += size
        return ShardOf(full_shape=full_shape, dim=int(dim), pieces=tuple(pieces))
    sizes = meta["partition_sizes"]
    begin = sum(sizes[:rank])
    return ShardOf(full_shape=full_shape, dim=int(dim), pieces=(Piece(begin, begin + sizes[rank]),))


def vocabulary_widths(vocab_size: int, size: int) -> tuple[int, ...]:
    """Rows of the head on each rank: DeepSpeed's own rule with a grain of one, the first ranks take the remainder."""
    return tuple(vocab_size // size + (rank < vocab_size % size) for rank in range(size))


def is_row_parallel(module: nn.Module) -> bool:
    """Whether a layer's products must be summed over the ranks before its bias is added."""
    return any(kind.__name__ in ("LinearAllreduce", "SubParamLinearAllreduce") for kind in type(module).__mro__)
