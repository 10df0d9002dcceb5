"""Writes the dashboards ``tessera.json`` and ``training.json`` from the list of their panels.

``make pictures`` runs it; ``--check`` proves that the committed files are what it writes, and writes nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Of a dashboard, in Grafana's units."""
OF = '{model_name=~"$model",instance=~"$instance"}'
"""What is chosen above the panels."""


@dataclass(frozen=True)
class Panel:
    """One panel: a single number or curves over time."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """Each with its legend. ``OF`` stands for what is chosen; ``RATE`` for the range that fits the picture's width."""
    description: str = ""
    stat: bool = False


def rate(name: str, by: str = "", labels: str = "") -> str:
    """How fast a counter grows, all that are chosen together."""
    chosen = OF if not labels else OF.replace("{", "{" + labels + ",")
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{chosen}[$__rate_interval]))"


def quantiles(name: str, *which: float) -> tuple[tuple[str, str], ...]:
    """Curves of a histogram."""
    inner = rate(f"{name}_bucket", "le")
    return tuple((f"histogram_quantile({q}, {inner})", f"p{q * 100:g}") for q in which or (0.5, 0.95, 0.99))


def mean(name: str) -> str:
    """A histogram's mean over a moment."""
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


SERVING = (
    Panel("Takes requests", "bool_yes_no", ((f"min(tessera_engine_up{OF})", ""),), stat=True),
    Panel("Ranks up", "none", ((f"sum(tessera_rank_up{OF})", ""),), stat=True),
    Panel("Tokens per second", "none", ((rate("tessera_generation_tokens_total"), ""),), stat=True),
    Panel(
        "KV cache in use", "percentunit", ((f"sum(tessera_kv_blocks_used{OF}) / sum(tessera_kv_blocks{OF})", ""),), stat=True
    ),
    Panel("Oldest in the queue", "s", ((f"max(tessera_queue_oldest_seconds{OF})", ""),), stat=True),
    Panel("Restarts, last day", "none", ((f"sum(increase(tessera_engine_restarts_total{OF}[1d]))", ""),), stat=True),
    Panel("Time to first token", "s", quantiles("tessera_time_to_first_token_seconds")),
    Panel("Inter-token latency", "s", quantiles("tessera_inter_token_latency_seconds")),
    Panel("Whole requests", "s", quantiles("tessera_e2e_request_latency_seconds")),
    Panel(
        "Tokens per second",
        "none",
        ((rate("tessera_prompt_tokens_total"), "prompt"), (rate("tessera_generation_tokens_total"), "generated")),
        "Prompt tokens count once their prompt is computed, cached or not.",
    ),
    Panel("Calls by status", "reqps", ((f"{rate('tessera_requests_total', 'code')} > 0", "{{code}}"),)),
    Panel(
        "Ends of requests",
        "reqps",
        (
            (f"{rate('tessera_request_finished_total', 'reason')} > 0", "{{reason}}"),
            (f"{rate('tessera_rejections_total', 'reason')} > 0", "refused: {{reason}}"),
        ),
    ),
    Panel(
        "Where a request's time goes",
        "s",
        (
            (mean("tessera_request_queue_time_seconds"), "queue"),
            (mean("tessera_request_prefill_time_seconds"), "prefill"),
            (mean("tessera_request_decode_time_seconds"), "decode"),
        ),
        "Means of requests that ended by themselves.",
    ),
    Panel("Time per output token", "s", quantiles("tessera_request_time_per_output_token_seconds")),
    Panel(
        "Lengths",
        "none",
        (
            (f"histogram_quantile(0.5, {rate('tessera_request_prompt_tokens_bucket', 'le')})", "prompt p50"),
            (f"histogram_quantile(0.95, {rate('tessera_request_prompt_tokens_bucket', 'le')})", "prompt p95"),
            (f"histogram_quantile(0.5, {rate('tessera_request_generation_tokens_bucket', 'le')})", "output p50"),
            (f"histogram_quantile(0.95, {rate('tessera_request_generation_tokens_bucket', 'le')})", "output p95"),
        ),
        "Tokens of accepted requests, however they ended.",
    ),
    Panel(
        "Requests",
        "none",
        ((f"sum(tessera_num_requests_running{OF})", "running"), (f"sum(tessera_num_requests_waiting{OF})", "waiting")),
    ),
    Panel(
        "Queue time",
        "s",
        (*quantiles("tessera_request_queue_time_seconds", 0.5, 0.95), (f"max(tessera_queue_oldest_seconds{OF})", "oldest now")),
    ),
    Panel("Queued prompt tokens", "none", ((f"sum(tessera_queued_prompt_tokens{OF})", "tokens"),)),
    Panel(
        "KV blocks",
        "none",
        (
            (f"sum(tessera_kv_blocks_used{OF})", "used"),
            (f"sum(tessera_kv_blocks_cached{OF})", "cached"),
            (f"sum(tessera_kv_blocks{OF})", "total"),
        ),
    ),
    Panel(
        "Prefix cache hits",
        "percentunit",
        ((f"{rate('tessera_prefix_cache_hits_total')} / {rate('tessera_prefix_cache_queries_total')}", "share of tokens"),),
    ),
    Panel(
        "Computed in vain",
        "none",
        ((rate("tessera_wasted_tokens_total", "reason"), "{{reason}}"),),
        "Positions a second that were computed twice, or for requests that then ended by an error.",
    ),
    Panel("Step time", "s", quantiles("tessera_step_seconds", 0.5, 0.95)),
    Panel("Positions per step", "none", quantiles("tessera_step_tokens", 0.5, 0.95)),
    Panel(
        "Guessed tokens that came",
        "none",
        (
            (rate("tessera_speculative_proposed_tokens_total"), "guessed"),
            (rate("tessera_speculative_accepted_tokens_total"), "came"),
        ),
        "Nothing without --speculative-tokens.",
    ),
    Panel(
        "Heartbeats and event loop",
        "s",
        (
            (f"tessera_rank_heartbeat_age_seconds{OF}", "{{instance}} rank {{rank}}"),
            (f"tessera_event_loop_lag_seconds{OF}", "{{instance}} event loop lag"),
        ),
    ),
    Panel("Memory of ranks", "bytes", ((f"tessera_rank_memory_bytes{OF} > 0", "{{instance}} rank {{rank}} {{where}}"),)),
    Panel(
        "Memory of GPUs",
        "bytes",
        (
            (f"tessera_gpu_memory_used_bytes{OF}", "{{instance}} rank {{rank}}"),
            (f"max(tessera_gpu_memory_bytes{OF})", "one has"),
        ),
        "Taken by whomever. This and what follows of GPUs needs the extra `gpu`.",
    ),
    Panel("GPUs compute", "percentunit", ((f"tessera_gpu_utilization_ratio{OF}", "{{instance}} rank {{rank}}"),)),
    Panel("Temperature of GPUs", "celsius", ((f"tessera_gpu_temperature_celsius{OF}", "{{instance}} rank {{rank}}"),)),
    Panel("Power of GPUs", "watt", ((f"tessera_gpu_power_watts{OF}", "{{instance}} rank {{rank}}"),)),
    Panel("Clock of GPUs", "hertz", ((f"tessera_gpu_clock_hertz{OF}", "{{instance}} rank {{rank}}"),)),
    Panel(
        "Losses, reloads",
        "none",
        (
            (f"sum by (reason) (increase(tessera_engine_failures_total{OF}[1h]))", "lost: {{reason}}"),
            (f"sum by (result) (increase(tessera_reloads_total{OF}[1h]))", "reload: {{result}}"),
        ),
        "Within the hour before.",
    ),
)

TRAINING = (
    Panel("Step", "none", ((f"max(tessera_train_step{OF})", ""),), stat=True),
    Panel("Done", "percentunit", ((f"max(tessera_train_step{OF} / tessera_train_steps{OF})", ""),), stat=True),
    Panel("Loss", "none", ((f"min(tessera_train_loss{OF})", ""),), stat=True),
    Panel("Tokens per second", "none", ((f"sum(tessera_train_tokens_per_second{OF})", ""),), stat=True),
    Panel("Model FLOPs used", "percentunit", ((f"avg(tessera_train_model_flops_utilization{OF})", ""),), stat=True),
    Panel("Since the last save", "s", ((f"max(time() - tessera_train_last_save_timestamp_seconds{OF})", ""),), stat=True),
    Panel(
        "Loss",
        "none",
        ((f"tessera_train_loss{OF}", "{{model_name}}"), (f"tessera_train_eval_loss{OF}", "{{model_name}} held out")),
        "Mean of the target tokens, in nats.",
    ),
    Panel("Norm of the gradient", "none", ((f"tessera_train_grad_norm{OF}", "{{model_name}}"),), "Before clipping."),
    Panel("Learning rate", "sci", ((f"tessera_train_learning_rate{OF}", "{{model_name}}"),)),
    Panel(
        "Tokens per second",
        "none",
        (
            (f"tessera_train_tokens_per_second{OF}", "{{model_name}}"),
            (rate("tessera_train_tokens_total", "model_name"), "{{model_name}} by count"),
        ),
    ),
    Panel("Time of a step", "s", quantiles("tessera_train_step_seconds", 0.5, 0.95)),
    Panel("Memory of rank 0", "bytes", ((f"tessera_train_memory_bytes{OF}", "{{model_name}} {{where}}"),)),
    Panel("Time of a save", "s", ((f"increase(tessera_train_save_seconds_sum{OF}[1h])", "{{model_name}}, last hour"),)),
    Panel("Saves, last day", "none", ((f"increase(tessera_train_saves_total{OF}[1d])", "{{model_name}}"),)),
    Panel(
        "What went wrong, last hour",
        "none",
        (
            (f"increase(tessera_train_skipped_steps_total{OF}[1h])", "{{model_name}} skipped: {{cause}}"),
            (f"increase(tessera_train_loss_spikes_total{OF}[1h])", "{{model_name}} loss spikes"),
        ),
    ),
)


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], known_by: str) -> dict[str, Any]:
    """Grafana's own form of a dashboard.

    Args:
        known_by: a series that every server or run has, which the lists of models and instances are read from.
    """
    places = iter(layout(panels))
    return {
        "uid": uid,
        "title": title,
        "tags": ["tessera"],
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "current": {}},
                variable("model", "Model", f"label_values({known_by}, model_name)"),
                variable("instance", "Instance", f'label_values({known_by}{{model_name=~"$model"}}, instance)'),
            ]
        },
        "panels": [drawn(number, panel, next(places)) for number, panel in enumerate(panels, 1)],
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A list to choose from, of which all is chosen at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def layout(panels: tuple[Panel, ...]) -> list[dict[str, int]]:
    """Places from left to right and down: six numbers or three pictures a row."""
    places, x, y, height = [], 0, 0, 0
    for panel in panels:
        w, h = (4, 4) if panel.stat else (8, 7)
        if x + w > WIDTH or (x and h != height):
            x, y = 0, y + height
        places.append({"h": h, "w": w, "x": x, "y": y})
        x, height = x + w, h
    return places


def drawn(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    """One panel in Grafana's form."""
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.stat:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "gridPos": place,
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Write both files, or compare them."""
    wanted = {
        "tessera.json": dashboard("tessera", "Tessera serving", SERVING, "tessera_engine_up"),
        "training.json": dashboard("tessera-training", "Tessera training", TRAINING, "tessera_train_step"),
    }
    for name, content in wanted.items():
        text = json.dumps(content, indent=1) + "\n"
        if "--check" not in sys.argv:
            (FOLDER / name).write_text(text, encoding="utf-8")
        elif (FOLDER / name).read_text(encoding="utf-8") != text:
            print(f"deploy/grafana/{name} is not what deploy/grafana/dashboards.py writes: make pictures", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
