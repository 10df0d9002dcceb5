"""A server's figures as a frame for a terminal."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from serve.top.reading import PREFIX, Reading, Span

NOTHING: Final = "–"
LATENCIES: Final = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "in the queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "whole request": "e2e_request_latency_seconds",
    "step": "step_seconds",
}
BROKEN: Final = ("INTERNAL", "UNKNOWN", "DATA_LOSS")


def frame(span: Span) -> RenderableType:
    """Everything there is to see of a server between two readings."""
    parts: list[RenderableType] = [_head(span.now), _pair(_flow(span), _latencies(span)), _pair(_cache(span), _ranks(span.now))]
    tenants = _tenants(span)
    if tenants is not None:
        parts.append(tenants)
    return Group(*parts)


def silence(url: str, why: str) -> RenderableType:
    """Instead of a frame, while nothing answers."""
    return Panel(Text(why, style="red"), title=f"tessera-top {escape(url)}", title_align="left")


def _pair(left: RenderableType, right: RenderableType) -> Table:
    both = Table.grid(expand=True, padding=(0, 1, 0, 0))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(left, right)
    return both


def _head(now: Reading) -> Panel:
    model = next((labels for labels, _ in now.each("model_info")), {})
    build = next((labels for labels, _ in now.each("build_info")), {})
    state = next((labels["state"] for labels, value in now.each("server_state") if value), "unknown")
    step = f" step {model['checkpoint_step']}" if model.get("checkpoint_step") else ""
    started = now.total("process_start_time_seconds")
    stages = model.get("pipeline_parallel_size", "1")
    up = "" if started is None else f", up {in_words(max(0.0, time.time() - started))}"
    text = Text.assemble(
        (model.get("model", "no model yet") + step, "bold"),
        f"  {model.get('family', '')} {model.get('dtype', '')} on {model.get('device', '?')}",
        f" × {model.get('tensor_parallel_size', '?')}" + (f" × {stages} stages" if stages != "1" else ""),
        f"  attention {model.get('attention', '?')}, linear {model.get('linear', '?')}",
        f"\nversion {build.get('version', '?')}{up}, restarts {count(now.total('engine_restarts_total'))}  ",
        (state, "bold green" if state == "serving" else "bold yellow"),
    )
    return Panel(text, title="tessera-top", title_align="left")


def _flow(span: Span) -> Panel:
    now, table = span.now, _plain()
    table.add_row("generated", f"{amount(span.rate('generation_tokens_total'))} tokens/s")
    table.add_row("prompts", f"{amount(span.rate('prompt_tokens_total'))} tokens/s")
    codes = span.rates("requests_total", "code")
    table.add_row(
        "calls", f"{amount(sum(codes.values()))} /s, broken {amount(sum(codes.get(code, 0.0) for code in BROKEN))} /s"
    )
    refused = {reason: value for reason, value in span.rates("rejections_total", "reason").items() if value}
    table.add_row("refused", ", ".join(f"{reason} {amount(value)} /s" for reason, value in refused.items()) or "none")
    table.add_row("running", count(now.total("num_requests_running")))
    oldest = now.total("queue_oldest_seconds")
    waiting = f"{count(now.total('num_requests_waiting'))}, {count(now.total('queued_prompt_tokens'))} prompt tokens"
    table.add_row("waiting", waiting + (f", the oldest for {in_words(oldest)}" if oldest else ""))
    return Panel(table, title="throughput and queue", title_align="left")


def _latencies(span: Span) -> Panel:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column()
    for name in ("p50", "p95", "p99"):
        table.add_column(name, justify="right")
    for name, series in LATENCIES.items():
        table.add_row(name, *(in_words(span.quantile(series, q)) for q in (0.5, 0.95, 0.99)))
    return Panel(table, title="latencies", title_align="left")


def _cache(span: Span) -> Panel:
    now, table = span.now, _plain()
    used, total = now.total("kv_blocks_used") or 0.0, now.total("kv_blocks") or 0.0
    table.add_row("blocks", f"{used:.0f} of {total:.0f} held, {count(now.total('kv_blocks_cached'))} kept for reuse")
    table.add_row("", ProgressBar(total=max(total, 1.0), completed=used, width=32))
    looked, found = span.rate("prefix_cache_queries_total"), span.rate("prefix_cache_hits_total")
    table.add_row("prefix hits", f"{found / looked:.0%}" if looked and found is not None else NOTHING)
    table.add_row("preempted", f"{amount(span.rate('preemptions_total'))} /s")
    wasted = {reason: value for reason, value in span.rates("wasted_tokens_total", "reason").items() if value}
    table.add_row("in vain", ", ".join(f"{reason} {amount(value)}/s" for reason, value in wasted.items()) or "nothing")
    guessed, came = span.rate("speculative_proposed_tokens_total"), span.rate("speculative_accepted_tokens_total")
    if guessed and came is not None:
        table.add_row("guesses", f"{came / guessed:.0%} of {amount(guessed)} /s")
    return Panel(table, title="KV cache", title_align="left")


def _ranks(now: Reading) -> Panel:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("rank", "state", "heard of", "host", "device"):
        table.add_column(name, justify="left" if name == "state" else "right")
    ages = now.by("rank_heartbeat_age_seconds", "rank")
    for rank, up in sorted(now.by("rank_up", "rank").items(), key=lambda item: int(item[0])):
        state = Text("up", style="green") if up else Text("down", style="red")
        memory = [now.total("rank_memory_bytes", rank=rank, where=where) for where in ("host", "device")]
        table.add_row(rank, state, in_words(ages.get(rank)) if up else NOTHING, *(in_bytes(value) for value in memory))
    return Panel(table, title="ranks", title_align="left")


def _tenants(span: Span) -> Panel | None:
    """Everything that the server keeps by tenant, whatever that is: how counters grow, and what gauges say."""
    names = sorted(set(span.now.named("tenant", "")), key=lambda name: (not name.endswith("_total"), name))
    if not names:
        return None
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("tenant")
    columns: list[dict[str, str]] = []
    for name in names:
        title = name.removeprefix(f"{PREFIX}tenant_").removeprefix(PREFIX)
        if title.endswith("_total"):
            title = f"{title.removesuffix('_total')} /s"
            columns.append({tenant: amount(value) for tenant, value in span.rates(name, "tenant").items()})
        else:
            columns.append({tenant: count(value) for tenant, value in span.now.by(name, "tenant").items()})
        table.add_column(title.replace("_", " "), justify="right")
    for tenant in sorted({tenant for column in columns for tenant in column}):
        table.add_row(escape(tenant), *(column.get(tenant, NOTHING) for column in columns))
    return Panel(table, title="tenants", title_align="left")


def _plain() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    return table


def count(value: float | None) -> str:
    """A number without its fraction, its thousands apart."""
    return NOTHING if value is None else f"{value:,.0f}"


def amount(value: float | None) -> str:
    """A number with as many digits as say something."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def in_words(seconds: float | None) -> str:
    """A duration, in the unit that fits it."""
    if seconds is None:
        return NOTHING
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def in_bytes(value: float | None) -> str:
    """Bytes of memory, in MiB or GiB."""
    if not value:
        return NOTHING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
