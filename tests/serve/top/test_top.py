"""A server in a terminal: what is shown is what its metrics say."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from serve.engine.executor import ModelFacts
from serve.engine.stats import EngineStats, Recomputed, TenantStats
from serve.errors import QueueFull
from serve.metrics import Metrics
from serve.series import Course
from serve.top import cli
from serve.top.reaching import Place
from serve.top.reading import NoReading, Span, parsed, read
from serve.top.screen import frame
from serve.types import FinishReason

FACTS = ModelFacts(
    family="gpt_neox", vocab_size=100, max_model_len=64, eos_ids=(0,), dtype="bfloat16", device="cpu", num_blocks=80,
    block_tokens=4, num_parameters=1000, checkpoint_step=320, attention="kernel", linear="onednn",
)  # fmt: skip


def stats(**changed: object) -> EngineStats:
    values: dict[str, object] = dict.fromkeys(EngineStats.__slots__, 0)
    values |= {"last_step": None, "queued_since_seconds": None, "recomputed": Recomputed(), "tenants": ()}
    return EngineStats(**(values | changed))  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(version="1.2.3", num_ranks=2, model_name="mine", clock=lambda: 100.0)
    made.engine_started(stats(kv_blocks_total=80), FACTS, model="mine")
    made.server_entered("serving")
    made.ranks.memory([(3 << 30, 0), (1 << 29, 0)])
    return made


def shown(metrics: Metrics, happens: Callable[[], None], *, seconds: float = 2.0, more: str = "", later: str = "") -> str:
    """The frame, as plain text, of what happens within so many seconds."""
    before = parsed(metrics.exposition() + more, 10.0, "here")
    happens()
    now = parsed(metrics.exposition() + (later or more), 10.0 + seconds, "here")
    console = Console(file=io.StringIO(), width=120)
    console.print(frame(Span(before, now)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_says_what_is_served_and_how_it_fares(metrics: Metrics) -> None:
    def happens() -> None:
        metrics.tokens_generated(300)
        metrics.prompt_computed(50)
        metrics.rejected(QueueFull("", reason="tokens", retry_after_seconds=1.0))
        metrics.request_ended("Generate", "OK")
        metrics.request_ended("Generate", "INTERNAL")
        metrics.first_token(0.03)
        course = Course(queue_seconds=0.5, first_token_seconds=0.6, total_seconds=2.0, longest_tokens=3)
        metrics.finished(FinishReason.EOS, course)
        metrics.heartbeat_ages((0.2, 0.3))
        metrics.engine_advanced(
            stats(num_running=3, num_waiting=4, queued_tokens=77, queued_since_seconds=88.0, kv_blocks_used=20,
                  kv_blocks_total=80, prefix_cache_queries=100, prefix_cache_hits=25, recomputed=Recomputed(preempted=40))
        )  # fmt: skip

    text = shown(metrics, happens)
    for words in (
        "mine step 320", "gpt_neox bfloat16 on cpu × 2", "serving", "150 tokens/s", "25 tokens/s", "1 /s, broken 0.5 /s",
        "tokens 0.5 /s", "4, 77 prompt tokens, the oldest for 12 s", "20 of 80 held", "25%",
        "preempted 20/s", "3.00 GiB", "512 MiB",
    ):  # fmt: skip
        assert words in text, f"{words!r} is not in\n{text}"
    assert re.search(r"first token +30 ms +39 ms +39\.8 ms", text), "within the bucket of 20 to 40 ms"
    assert re.search(r"between tokens +– +– +–", text), "nothing came meanwhile"
    assert "tenants" not in text


def test_what_a_server_keeps_by_tenant_is_shown_whatever_it_is_called(metrics: Metrics) -> None:
    line = '# TYPE tessera_tenant_tokens_total counter\ntessera_tenant_tokens_total{{tenant="[red]a"}} {}\n'
    text = shown(metrics, lambda: None, more=line.format(10), later=line.format(30))
    assert "tenants" in text
    assert re.search(r"\[red\]a +10", text), "a tenant's name is no markup"


def test_what_tenants_ask_for_and_have_is_shown_side_by_side(metrics: Metrics) -> None:
    def happens() -> None:
        metrics.tenants.accepted("alice")
        metrics.tenants.generated("alice", 60)
        metrics.tenants.held("bob", 7)
        metrics.tenants.engine((TenantStats("alice", 2, 31),))

    text = shown(metrics, happens)
    row = next(line.split() for line in text.splitlines() if " alice " in line)
    assert row[row.index("alice") + 1 :][:6] == ["30", "0", "0.5", "0", "31", "2"], "three rates, then three figures"
    assert re.search(r"bob .* 7 ", text)


def test_a_server_that_was_started_again_counts_from_zero(metrics: Metrics) -> None:
    metrics.tokens_generated(1000)
    before = parsed(metrics.exposition(), 0.0, "here")
    again = Metrics(version="1.2.3", num_ranks=2)
    again.tokens_generated(30)
    assert Span(before, parsed(again.exposition(), 10.0, "here")).rate("generation_tokens_total") == 3.0


def test_a_value_beyond_the_last_bucket_is_told_by_where_that_begins(metrics: Metrics) -> None:
    before = parsed(metrics.exposition(), 0.0, "here")
    metrics.first_token(5000.0)
    span = Span(before, parsed(metrics.exposition(), 1.0, "here"))
    assert span.quantile("time_to_first_token_seconds", 0.5) == 2560.0


@pytest.fixture
def url(metrics: Metrics) -> Iterator[str]:
    endpoint = metrics.listen("127.0.0.1", 0)
    yield endpoint.url
    endpoint.close()


@pytest.mark.parametrize("shortened", [False, True])
def test_once_prints_one_frame(url: str, shortened: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([url.split("/")[2] if shortened else url, "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("mine step 320") == 1
    assert "KV cache" in said


def test_what_does_not_answer_as_a_server_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert cli.main([address, "--once"]) == 1
        assert f"tessera-top: http://{address}/metrics does not answer" in capsys.readouterr().err
    with pytest.raises(NoReading, match="not with those of tessera-serve"):
        parsed("# TYPE other gauge\nother 1\n", 0.0, "here")
    with pytest.raises(NoReading, match="not with metrics"):
        parsed("<html>\n", 0.0, "here")
    assert cli.main(["--interval", "0"]) == 2
    assert "must be at least 0.1 s" in capsys.readouterr().err
    for nonsense in ("nonsense://x/metrics", "here:port", "http://[::1/metrics"):
        assert cli.main([nonsense, "--once"]) == 2
        assert f"the address is {nonsense!r}; it must be HOST:PORT" in capsys.readouterr().err


def test_live_it_goes_on_when_the_server_does_not_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []

    class Screen:
        def __enter__(self) -> Screen:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, shown: object, *, refresh: bool) -> None:
            console = Console(file=io.StringIO(), width=100)
            console.print(shown)
            frames.append(console.file.getvalue())  # type: ignore[attr-defined]

    readings = iter([read(Place(url)), NoReading("it is gone"), read(Place(url))])

    def next_reading(_: Place) -> object:
        reading = next(readings, KeyboardInterrupt())
        if isinstance(reading, BaseException):
            raise reading
        return reading

    monkeypatch.setattr(cli, "Live", lambda **_: Screen())
    monkeypatch.setattr(cli, "read", next_reading)
    monkeypatch.setattr(cli.time, "sleep", lambda _: None)
    assert cli.main([url]) == 0
    assert ["it is gone" in each for each in frames] == [False, True, False]
