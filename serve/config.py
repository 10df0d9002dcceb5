"""Every knob of the server: read once, checked once, never changed. What the machine decides is ``ModelFacts``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from serve.listening import RpcConfig as RpcConfig  # part of this module, too: users configure by it
from serve.naming import own_name
from serve.rules import require, require_positive
from serve.tracing.config import TracingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which checkpoint is served, and how its weights lie on the devices."""

    path: str
    """Folder of a checkpoint that ``checkpoint.open_checkpoint`` recognises."""

    name: str = ""
    """Name clients see; empty means the last part of ``path`` that is a run's own, not ``checkpoints`` or ``step-00000320``."""

    config: str = ""
    """The model's ``config.json``, or a folder that has one, for a checkpoint that has none beside or above its weights."""

    tokenizer: str = ""
    """Folder of the tokenizer's files, or one such file, for a checkpoint that has none beside or above its weights."""

    neox_qkv_layout: Literal["blocks", "per-head"] = "blocks"
    """How GPT-NeoX packed heads that share keys: ``blocks`` since November 2024, ``per-head`` before; no checkpoint says."""

    weights_prefix: str | None = None
    """What the names of the weights begin with, such as ``app.model.``, in a checkpoint that holds several things by names."""

    adapter: str = ""
    """Folder of a LoRA adapter that is added to the model as it is loaded. ``path`` may be an adapter's folder itself."""

    base: str = ""
    """Folder of the base model, or ``hf:ORG/NAME`` in the hub's local cache, where ``path`` is an adapter that does not say."""

    adapter_config: str = ""
    """The ``adapter_config.json`` of a DeepSpeed save with a LoRA adapter in the model, where it is not beside or above it."""

    master_weights: bool = False
    """In a DeepSpeed folder of ZeRO-0, 1 or 2: serve the optimizer's fp32 master weights, not the module as it was trained."""

    layer_map: str = ""
    """For a DeepSpeed pipeline of no known family: a YAML or JSON file that says which names of the model each layer has."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer. Each takes whole heads: at most as many ranks as query heads."""

    pipeline_parallel_size: int = 1
    """Stages that share the layers, one after another, each of ``tensor_parallel_size`` ranks: at most as many as layers. Of
    two numbers of ranks the one with fewer stages answers sooner; a stage needs little of the network before it."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and cache: ``auto`` is the checkpoint's own."""

    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """What the weights of linear layers are rounded to as they are read: ``int8`` is whole numbers with a scale for each
    output, ``int4`` with one for each ``quantization_group`` of its inputs; activations and the cache keep ``dtype``. ``fp8``
    is for GPUs of compute capability 8.9 or higher, and rounds activations too."""

    quantization_group: int = 32
    """Inputs that share a scale with ``int4``: 32, 64 or 128. Smaller groups round less and take more room."""

    draft_model: str = ""
    """Folder of a smaller checkpoint with the same tokenizer, which guesses the tokens of ``speculative_tokens``; rank 0 has
    all of it. Empty: they are looked up in what texts have said before."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is cuda where there is one, else cpu."""

    verify: Literal["auto", "structure", "sha256"] = "auto"
    """What is proved of the checkpoint before it is served: ``structure`` reads headers and sizes, ``sha256`` every byte
    against the manifest; ``auto`` is sha256 where there is a manifest."""

    verify_logits: bool = False
    """Whether several ranks are compared with the whole model, which rank 0 then loads beside its part, before they serve."""

    watch: float | None = None
    """Seconds between two looks for a newer checkpoint at ``path``, served then as by ``Admin.Reload``; ``None``: no looks."""

    swap_memory_gib: float | None = None
    """GiB that newer weights may take beside those that are served, on all ranks together; ``None`` is what is free. With less
    than they need they are read into place while no step is computed."""

    max_model_len: int | None = None
    """Positions (prompt and output) a sequence may have; ``None`` is the model's own limit."""

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", self.path, "name a checkpoint folder")
        require(self.tensor_parallel_size >= 1, "model.tensor_parallel_size", self.tensor_parallel_size, "be at least 1")
        stages = self.pipeline_parallel_size
        require(stages >= 1, "model.pipeline_parallel_size", stages, "be at least 1")
        require(
            stages == 1 or not self.draft_model,
            "model.pipeline_parallel_size",
            stages,
            "be 1 with model.draft_model; guesses that are looked up in texts are computed by any number of stages",
        )
        require(
            stages == 1 or not self.verify_logits,
            "model.pipeline_parallel_size",
            stages,
            "be 1 with model.verify_logits, which compares ranks that share every layer",
        )
        require(
            self.quantization_group in (32, 64, 128), "model.quantization_group", self.quantization_group, "be 32, 64 or 128"
        )
        require(
            self.quantization == "none" or not self.verify_logits,
            "model.quantization",
            self.quantization,
            "be none with model.verify_logits: each rank rounds its own part of a weight, so ranks differ from the whole model",
        )
        if self.watch is not None:
            require_positive("model.watch", self.watch)
        require(
            self.swap_memory_gib is None or (math.isfinite(self.swap_memory_gib) and self.swap_memory_gib >= 0),
            "model.swap_memory_gib",
            self.swap_memory_gib,
            "be 0 or more",
        )
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            "model.max_model_len",
            self.max_model_len,
            "be at least 2",
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def served_name(self) -> str:
        """The name clients see, and every series of the server bears."""
        return self.name or own_name(self.path) or self.path


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
    """Machines that share the ranks evenly, this one first; on each of the others ``tessera-serve agent`` runs."""

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
            self.model.num_ranks % self.nodes.count == 0,
            "model.tensor_parallel_size" + (f" times model.pipeline_parallel_size ({stages})" if stages > 1 else ""),
            self.model.num_ranks,
            f"be a multiple of nodes.count, which is {self.nodes.count}",
        )
        require(
            stages == 1 or self.kernels.cuda_graphs != "on",
            "model.pipeline_parallel_size",
            stages,
            "be 1 with kernels.cuda_graphs on: no step is captured in which stages wait for one another",
        )
        require(
            not self.model.draft_model or self.scheduler.speculative_tokens > 0,
            "scheduler.speculative_tokens",
            self.scheduler.speculative_tokens,
            "be at least 1 with model.draft_model, which guesses so many",
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.model.num_ranks // self.nodes.count
