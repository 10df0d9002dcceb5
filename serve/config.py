"""Every knob of the server: read once, checked once, never changed. What the machine decides is ``ModelFacts``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from serve.listening import RpcConfig as RpcConfig  # part of this module, too: users configure by it
from serve.rules import require, require_positive
from serve.served import ModelConfig as ModelConfig
from serve.tracing.config import TracingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """How much memory the KV cache takes, and how it is cut."""

    block_tokens: int = 16
    """Positions per block. Larger blocks mean shorter tables and more waste at the end of each sequence."""

    kv_cache_gib: float | None = None
    """GiB of KV cache per rank; ``None`` lets the rank choose from its free memory."""

    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """What keys and values are kept in: ``auto`` is the model's ``dtype``, ``int8`` whole numbers with a scale for each
    position and head, on the CPU; ``fp8`` is for GPUs."""

    memory_fraction: float = 0.90
    """On a GPU without ``kv_cache_gib``: share of its memory this rank may use in all, weights included."""

    prefix_caching: bool = True
    """Whether requests may reuse the KV blocks of an equal prompt prefix with the same ``cache_salt``."""

    def __post_init__(self) -> None:
        require(1 <= self.block_tokens <= 1024, "cache.block_tokens", self.block_tokens, "lie between 1 and 1024")
        require(
            self.kv_cache_gib is None or (math.isfinite(self.kv_cache_gib) and self.kv_cache_gib > 0),
            "cache.kv_cache_gib",
            self.kv_cache_gib,
            "be greater than 0",
        )
        require(
            0.0 < self.memory_fraction < 1.0,
            "cache.memory_fraction",
            self.memory_fraction,
            "lie between 0 and 1, both excluded",
        )


MAX_SPECULATIVE_TOKENS: Final = 64
"""Tokens that a server or a request may ask to have guessed in one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How much one step does."""

    max_num_seqs: int = 256
    """Sequences running at once."""

    max_step_tokens: int = 512
    """Positions computed in one step, all sequences together: the token budget that chunks long prompts."""

    async_scheduling: bool = True
    """Plan and send a step while the ranks compute the one before it, whose tokens stay there, wherever they would wait for the
    server for a hundredth of a step or more otherwise. Answers are the same."""

    speculative_tokens: int = 0
    """Tokens that are guessed at most in one step, from what texts have said before, and computed beside those that are due:
    what the model chooses too is output, so that texts that repeat themselves take fewer steps. 0 guesses nothing."""

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, "scheduler.max_num_seqs", self.max_num_seqs, "be at least 1")
        require(self.max_step_tokens >= 1, "scheduler.max_step_tokens", self.max_step_tokens, "be at least 1")
        require(
            0 <= self.speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            "scheduler.speculative_tokens",
            self.speculative_tokens,
            f"lie between 0 and {MAX_SPECULATIVE_TOKENS}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """What is refused before it costs anything."""

    max_queued_requests: int = 1024
    """Requests waiting for their first step; one more gets RESOURCE_EXHAUSTED."""

    max_queued_tokens: int = 1_000_000
    """Prompt tokens of all waiting requests together."""

    max_num_sequences: int = 64
    """``num_sequences`` of one request."""

    max_logprobs: int = 20
    """``logprobs`` and ``prompt_logprobs`` of one request."""

    max_answer_logprobs: int = 524_288
    """Log probabilities of given tokens in one answer: of a prompt, or of all items of a Score call; each token has its own and
    those of the likeliest others that are asked for."""

    max_stop_strings: int = 16
    """Stop strings of one request."""

    max_stop_string_bytes: int = 256
    """UTF-8 bytes of one stop string."""

    max_stop_ids: int = 64
    """Stop ids of one request."""

    max_logit_bias: int = 1024
    """Entries of ``logit_bias``."""

    max_id_list: int = 65_536
    """Entries of ``allowed_ids`` and of ``banned_ids``."""

    max_prompt_bytes: int = 4 * 1024 * 1024
    """UTF-8 bytes of a text prompt, checked before it is tokenised."""

    max_waiting_bytes: int = 256 * 1024 * 1024
    """Bytes of large messages and long texts, all callers' together, that wait to be read or to become tokens. A caller may
    have as many of them as are left: one alone half of them."""

    max_chat_messages: int = 4096
    """Messages of one conversation."""

    max_score_items: int = 1024
    """Texts of one Score call."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require(getattr(self, name) >= 1, f"admission.{name}", getattr(self, name), "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig:
    """How the ranks' lives are watched."""

    start_timeout_seconds: float = 1800.0
    """From spawning the ranks to all of them ready."""

    heartbeat_timeout_seconds: float = 6.0
    """A rank silent for longer is frozen: all ranks are killed and started again."""

    load_stall_seconds: float = 10.0
    """A rank that for so long, while the model is loaded, neither reads nor computes hangs or is frozen: the start failed."""

    step_timeout_seconds: float = 120.0
    """How long the first step since the ranks were started may take, and one more than twice as large as any before it."""

    step_margin_seconds: float = 15.0
    """How much longer than the longest step so far, in proportion where it is larger than any, another step may take; then a
    rank hangs, though its heart beats."""

    fork_ranks: bool = True
    """Ranks are forked from one process that imports torch, transformers and DeepSpeed once, so that a restart takes no longer
    than the weights do; off, or with CUDA, each rank is started as a program and imports them itself."""

    requeue: bool = True
    """Requests of which nothing was generated yet when the ranks died wait for the next ones, and so do requests that come
    meanwhile; off, they end with UNAVAILABLE."""

    resume_streams: bool = True
    """Requests of which something was generated go on after the ranks' death where they were: the next ranks compute them again
    from their tokens. Needs ``requeue``."""

    max_restarts_in_a_row: int = 5
    """Restarts without a successful step in between; after that the server exits 1."""

    def __post_init__(self) -> None:
        require_positive("supervisor.start_timeout_seconds", self.start_timeout_seconds)
        require_positive("supervisor.heartbeat_timeout_seconds", self.heartbeat_timeout_seconds)
        require_positive("supervisor.load_stall_seconds", self.load_stall_seconds)
        require_positive("supervisor.step_timeout_seconds", self.step_timeout_seconds)
        require_positive("supervisor.step_margin_seconds", self.step_margin_seconds)
        require(self.max_restarts_in_a_row >= 0, "supervisor.max_restarts_in_a_row", self.max_restarts_in_a_row, "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesConfig:
    """Ranks on several machines."""

    count: int = 1
    """Machines that share the ranks near evenly, this one first; on each of the others ``tessera-serve agent`` runs."""

    agents_listen: str = ""
    """``HOST:PORT`` at which agents join, by TLS and a key; ranks of all nodes meet and exchange activations at that address,
    without either: the network between nodes must be private."""

    agents_key_file: str = ""
    """File of a key of at least 32 bytes that the agents have too."""

    agents_tls_cert: str = ""
    """PEM certificate that agents are shown; empty: one made at the start, which the key vouches for."""

    agents_tls_key: str = ""
    """PEM private key of ``agents_tls_cert``."""

    def __post_init__(self) -> None:
        require(self.count >= 1, "nodes.count", self.count, "be at least 1")
        if self.count > 1:
            host, _, port = self.agents_listen.rpartition(":")
            given = bool(host) and port.isdecimal() and int(port) < 1 << 16
            require(given, "nodes.agents_listen", self.agents_listen, "be HOST:PORT with several nodes")
            require(bool(self.agents_key_file), "nodes.agents_key_file", self.agents_key_file, "name a file with several nodes")
        both = bool(self.agents_tls_cert) == bool(self.agents_tls_key)
        require(both, "nodes.agents_tls_key", self.agents_tls_key, "be given with nodes.agents_tls_cert, and only then")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Where the compiled CPU kernels are, and what of a GPU's work is launched as one."""

    cache_dir: str = ""
    """Folder that keeps what is compiled on first use; empty is ``tessera`` below XDG_CACHE_HOME or ``~/.cache``."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Whether steps of one token of each sequence are captured when the ranks start, as CUDA graphs: ``auto`` does so on GPUs
    where a model can be, ``on`` refuses one that cannot, and on the CPU captures and replays them in plain torch, slowly."""

    record_steps: bool = True
    """Whether on the CPU steps of one token of each of few sequences, and on one rank all layers but the last of other steps,
    are recorded as lists of kernels' calls and replayed, without Python between the calls; nothing else changes by it."""

    compress_weights: bool = True
    """Whether on the CPU, with AVX-512, linear layers' weights of bf16 that are not quantized are kept in 12 bits each, from
    which every bit comes back: no number changes by it, up to a dozen sequences take less time, some dozens a little more."""

    pack_later: bool = True
    """Whether on the CPU weights that lie in their files as the model wants them are mapped at the start and packed while the
    model serves, which so begins at once; off, it serves when all are packed. Nothing else changes by it."""

    narrow_head: bool = True
    """Whether on the CPU the likeliest tokens are looked for by a copy of the head in half as many bits, which finds the same,
    where the head is a good part of a small model's weights; nothing else changes by it."""

    cuda_graph_max_batch: int = 256
    """Sequences of the largest step that is captured, at most ``max_num_seqs``; larger ones are launched piece by piece."""

    def __post_init__(self) -> None:
        require(
            1 <= self.cuda_graph_max_batch <= 4096,
            "kernels.cuda_graph_max_batch",
            self.cuda_graph_max_batch,
            "lie between 1 and 4096",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The whole configuration, as ``--print-config`` shows it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    rpc: RpcConfig = field(default_factory=RpcConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)

    def __post_init__(self) -> None:
        stages = self.model.pipeline_parallel_size
        require(
            self.model.num_ranks >= self.nodes.count,
            "model.tensor_parallel_size" + (f" times model.pipeline_parallel_size ({stages})" if stages > 1 else ""),
            self.model.num_ranks,
            f"be at least nodes.count, which is {self.nodes.count}: each machine has a rank",
        )
        require(
            stages == 1 or self.kernels.cuda_graphs != "on",
            "model.pipeline_parallel_size",
            stages,
            "be 1 with kernels.cuda_graphs on: no step is captured in which stages wait for one another",
        )
        require(
            not self.model.gpus or self.nodes.count == 1,
            "model.gpus",
            self.model.gpus,
            "be empty with several nodes: CUDA_VISIBLE_DEVICES of each node says it there",
        )
        require(
            not self.model.draft_model or self.scheduler.speculative_tokens > 0,
            "scheduler.speculative_tokens",
            self.scheduler.speculative_tokens,
            "be at least 1 with model.draft_model, which guesses so many",
        )

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """Ranks on each machine, this one first: near evenly, the first ones take what is left over."""
        share, rest = divmod(self.model.num_ranks, self.nodes.count)
        return tuple(share + (node < rest) for node in range(self.nodes.count))
