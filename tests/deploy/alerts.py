"""What each alert is for, as series that make it fire, and an hour in which none of them may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

A: Final = 'job="tessera",instance="a:9400",model_name="m"'
B: Final = 'job="tessera",instance="b:9400",model_name="m"'
OF_A: Final = {"job": "tessera", "instance": "a:9400", "model_name": "m"}
OF_MODEL: Final = {"job": "tessera", "model_name": "m"}
UP: Final = {f"tessera_engine_up{{{A}}}": "1x400", f"tessera_engine_up{{{B}}}": "1x400"}
"""Two servers that take requests, for alerts that look at something else."""


@dataclass(frozen=True, slots=True)
class Case:
    """An alert that fires for one of two servers, or for the model of both, and not before its time."""

    alert: str
    series: dict[str, str]
    """A sample a minute, in promtool's notation."""
    labels: dict[str, str]
    """Of the alert that fires, its severity left out."""
    silent_minutes: int
    firing_minutes: int
    interval: str = "1m"
    without: tuple[str, ...] = field(default=())
    """Of the two servers' own series, those that are not there."""

    def all_series(self) -> dict[str, str]:
        """With what is well beside it."""
        return {name: values for name, values in UP.items() if name not in self.without} | self.series


def both(name: str, a: str, b: str, labels: str = "") -> dict[str, str]:
    """One series of each server."""
    more = f",{labels}" if labels else ""
    return {f"{name}{{{A}{more}}}": a, f"{name}{{{B}{more}}}": b}


def tokens(slow: int, all_: int, minutes: int) -> dict[str, str]:
    """Gaps between tokens: so many a minute of all come late, on the first server; none on the other."""
    return {
        **both("tessera_inter_token_latency_seconds_bucket", f"0+{all_ - slow}x{minutes}", f"0+{all_}x{minutes}", 'le="0.25"'),
        **both("tessera_inter_token_latency_seconds_count", f"0+{all_}x{minutes}", f"0+{all_}x{minutes}"),
    }


ENGINE_OF_A: Final = f"tessera_engine_up{{{A}}}"

CASES: Final = (
    Case("TesseraDown", {ENGINE_OF_A: "1x9 0x40"}, OF_A, 10, 12, without=(ENGINE_OF_A,)),
    # The engine's own series go with the process: nothing is zero, something is missing.
    Case(
        "TesseraServerGone",
        {ENGINE_OF_A: "1x9 stale", **both("up", "1x9 0x40", "1x49")} | {"up{job=\"other\",instance=\"c\"}": "0x50"},
        {"job": "tessera", "instance": "a:9400", "model_name": "m"}, 10, 12,
    ),
    Case("TesseraFewerServers", {ENGINE_OF_A: "1x9 stale"}, OF_MODEL, 15, 25),
    # The only one of its model, beside two of another.
    Case(
        "TesseraModelGone", {'tessera_engine_up{job="tessera",instance="c:9400",model_name="n"}': "1x9 stale"},
        {"job": "tessera", "model_name": "n"}, 13, 18,
    ),
    Case(
        "TesseraCrashLoop", both("process_start_time_seconds", "100x5 400x5 700x5 1000x30", "100x50"), OF_A, 14, 18,
    ),
    Case("TesseraRanksRestarting", both("tessera_engine_restarts_total", "0x5 1x5 2x5 3x5 4x30", "0x50"), OF_A, 10, 25),
    Case(
        "TesseraRanksFrozen",
        both("tessera_engine_failures_total", "0x9 1x40", "0x50", 'reason="frozen"')
        | both("tessera_engine_failures_total", "0x50", "1+1x50", 'reason="died"'),
        OF_A, 9, 12,
    ),
    Case(
        "TesseraRankOutOfMemory", both("tessera_engine_failures_total", "0x9 1x40", "0x50", 'reason="memory"'),
        OF_A | {"reason": "memory"}, 9, 12,
    ),
    Case(
        "TesseraErrors",
        both("tessera_requests_total", "0+10x60", "0+1000x60", 'method="Generate",code="INTERNAL"')
        | both("tessera_requests_total", "0+500x60", "0+99000000x60", 'method="Generate",code="OK"'),
        OF_A, 4, 12,
    ),
    # The other one has room: of both together, well under one call in a hundred is refused.
    Case(
        "TesseraRefusing",
        both("tessera_rejections_total", "0+20x60", "0x60", 'reason="requests"')
        | both("tessera_requests_total", "0+100x60", "0+9900x60", 'method="Generate",code="OK"'),
        OF_A, 4, 12,
    ),
    Case("TesseraStarving", both("tessera_queue_oldest_seconds", "0+20x60", "0+1x20 0x40"), OF_A, 3, 6),
    Case(
        "TesseraStuck",
        both("tessera_num_requests_waiting", "0x10 3x50", "3x60") | both("tessera_num_requests_running", "0x60", "1x60")
        | both("tessera_step_seconds_count", "100x60", "0+10x60"),
        OF_A, 14, 18,
    ),
    Case(
        "TesseraPreempting",
        both("tessera_wasted_tokens_total", "0+300x60", "0+1x60", 'reason="preempted"')
        | both("tessera_step_tokens_sum", "0+1000x60", "0+1000x60"),
        OF_A, 8, 25,
    ),
    Case(
        "TesseraCacheFull",
        both("tessera_kv_blocks_used", "10x9 98x50", "90x60") | both("tessera_kv_blocks", "100x60", "100x60"),
        OF_A, 15, 25,
    ),
    Case(
        "TesseraSlowFirstToken",
        both("tessera_time_to_first_token_seconds_bucket", "0+90x60", "0+90x60", 'le="20.0"')
        | both("tessera_time_to_first_token_seconds_bucket", "0+100x60", "0+100x60", 'le="40.0"')
        | both("tessera_time_to_first_token_seconds_bucket", "0+100x60", "0+100x60", 'le="+Inf"'),
        OF_MODEL, 4, 15,
    ),
    # A fifth of all, which is half of one server's: more than 14.4 times what is allowed.
    Case("TesseraSlowTokens", tokens(40, 100, 400), OF_MODEL, 0, 70),
    # A fiftieth of all: more than is allowed, and too little to wake anybody.
    Case("TesseraSlowTokensForDays", tokens(4, 100, 400), OF_MODEL, 0, 390, "10m"),
    Case("TesseraNotFinite", both("tessera_nonfinite_requests_total", "0x9 1x40", "0x50"), OF_A, 9, 12),
    Case("TesseraReloadRefused", both("tessera_reloads_refused_total", "0x9 1x40", "0x50"), OF_A, 9, 12),
    Case("TesseraTokensRefused", both("tessera_token_reloads_refused_total", "0x9 1x40", "0x50"), OF_A, 9, 12),
    Case("TesseraAuditLinesLost", both("tessera_audit_lines_lost_total", "0x9 3x40", "0x50"), OF_A, 9, 12),
    # The other one, too, saw half of a new pair, and then all of it.
    Case(
        "TesseraCertificateRefused",
        both("tessera_certificate_reloads_refused_total", "0x9 1x40", "0x9 1x40")
        | both("tessera_certificate_expiry_timestamp_seconds", f"{90 * 86400}x50", f"{30 * 86400}x10 {90 * 86400}x40"),
        OF_A, 9, 14,
    ),
    # promtool's clock begins at 0: what was written at its first second is a day old after a day.
    Case(
        "TesseraCheckpointOld",
        both("tessera_checkpoint_timestamp_seconds", "1x1600", "1x1600")
        | both("tessera_watch_interval_seconds", "30x1600", "0x1600")
        | dict.fromkeys(UP, "1x1600"),
        OF_A, 1430, 1460,
    ),
    Case(
        "TesseraTrainNotSaved",
        {'tessera_train_last_save_timestamp_seconds{job="train",instance="c"}': "1x200 12000x500",
         'tessera_train_last_save_timestamp_seconds{job="train",instance="d"}': "1+60x700"},
        {"job": "train", "instance": "c"}, 500 - 120, 12000 // 60 + 360 + 15,
    ),
    Case(
        "TesseraCertificateEnds",
        both("tessera_certificate_expiry_timestamp_seconds", f"{20 * 86400}x1600", f"{90 * 86400}x1600"), OF_A,
        5 * 144, 7 * 144, "10m",
    ),
    Case(
        "TesseraCertificateEndsNow",
        both("tessera_certificate_expiry_timestamp_seconds", f"{5 * 86400}x1600", f"{90 * 86400}x1600"), OF_A,
        2 * 144, 4 * 144, "10m",
    ),
)  # fmt: skip


def lives(**of_instances: str) -> dict[str, str]:
    """Whether servers of a model take requests, each by its instance."""
    return {f'tessera_engine_up{{job="tessera",instance="{name}",model_name="m"}}': of_instances[name] for name in of_instances}


EXCHANGES: Final = {
    # A new one loads and takes requests before an old one drains: four of three for some minutes.
    "one after another": lives(
        a="1x32 stale", b="1x37 stale", c="1x42 stale", d="_x28 0x1 1x60", e="_x33 0x1 1x55", f="_x38 0x1 1x50",
    ),
    # As with GPUs: the old one is gone before the new one is there, which then loads.
    "the only one": lives(a="1x29 stale", b="_x32 0x4 1x55"),
    "its machine, where the address stays": lives(a="1x29 stale stale stale 0x4 1x55"),
}  # fmt: skip
"""Replicas of one model that give way to newer ones, an hour and a half long."""


def healthy() -> dict[str, str]:
    """Two servers under load for an hour and a half, and what happens to healthy ones too."""
    counts = {
        "tessera_requests_total": ('method="Generate",code="OK"', "0+600x90", "0+600x90"),
        "tessera_rejections_total": ('reason="requests"', "0+1x90", "0+1x90"),
        "tessera_engine_failures_total": ('reason="died"', "0x30 1x60", "0x90"),
        "tessera_wasted_tokens_total": ('reason="preempted"', "0+50x90", "0x90"),
        "tessera_time_to_first_token_seconds_bucket": ('le="1.0"', "0+600x90", "0+600x90"),
    }
    plain = {
        "tessera_engine_up": ("1x90", "1x90"),
        "up": ("1x90", "1x90"),
        "process_start_time_seconds": ("100x20 1300x70", "100x90"),
        "tessera_engine_restarts_total": ("0x30 1x60", "0x90"),
        "tessera_queue_oldest_seconds": ("0 2 0 1 3 0x85", "0x90"),
        "tessera_num_requests_waiting": ("2x90", "0x90"),
        "tessera_num_requests_running": ("8x90", "8x90"),
        "tessera_step_seconds_count": ("0+3000x90", "0+3000x90"),
        "tessera_step_tokens_sum": ("0+24000x90", "0+24000x90"),
        "tessera_kv_blocks_used": ("60x40 97x5 60x45", "60x90"),
        "tessera_kv_blocks": ("100x90", "100x90"),
        "tessera_nonfinite_requests_total": ("0x90", "0x90"),
        "tessera_reloads_refused_total": ("0x90", "0x90"),
        "tessera_token_reloads_refused_total": ("0x90", "0x90"),
        "tessera_audit_lines_lost_total": ("0x90", "0x90"),
        "tessera_certificate_reloads_refused_total": ("0x90", "0x90"),
        "tessera_checkpoint_timestamp_seconds": ("1x90", "0x90"),
        "tessera_watch_interval_seconds": ("30x90", "30x90"),
        "tessera_certificate_expiry_timestamp_seconds": (f"{90 * 86400}x90", "0x90"),
    }
    series = tokens(0, 20_000, 90) | {'tessera_train_last_save_timestamp_seconds{job="train",instance="c"}': "1+60x90"}
    for name, (labels, a, b) in counts.items():
        series |= both(name, a, b, labels)
    for name, (a, b) in plain.items():
        series |= both(name, a, b)
    return series | both("tessera_time_to_first_token_seconds_bucket", "0+600x90", "0+600x90", 'le="+Inf"')


def group(series: dict[str, str], interval: str, expectations: list[dict[str, Any]]) -> dict[str, Any]:
    """A group of promtool's tests."""
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": interval, "input_series": inputs, "alert_rule_test": expectations}
