"""Servers as an InferencePool: what the manifests say, and what becomes of calls where a picker chooses among the servers."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serve.client import AsyncClient, Options, Request, ScoreItem, TesseraError
from serve.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc
from tests.deploy.extension import Picker, gateway, needs_extension, picker_series, picking, route_of
from tests.deploy.extension_rules import (
    HEALTH_PORT,
    METRICS_PORT,
    OPTIONS,
    PICKING,
    PICKING_PORT,
    PLUGINS,
    POOL,
    ROUTE,
    problems,
)  # fmt: skip
from tests.deploy.test_kubernetes import rendered, the
from tests.deploy.test_replicas import code_of
from tests.serve.fake_executor import fake_facts
from tests.serve.rpc.running import RunningServer, request, serving

pytestmark = pytest.mark.deploy

ALONE = (("grpc.use_local_subchannel_pool", 1),)
LONG = 40_000
"""Ids of a prompt whose request and echo go back from the picker in several pieces."""
LARGE_ID = 200
"""It takes two bytes."""


@cache
def documents() -> list[dict[str, Any]]:
    return rendered("pool")


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in documents() if each["kind"] == kind and each["metadata"]["name"].startswith(name))
    return found


def config() -> dict[str, Any]:
    """The picker's own."""
    loaded: dict[str, Any] = yaml.safe_load(the("ConfigMap", documents())["data"]["picking.yaml"])
    return loaded


# What is written.


def test_pool_route_and_the_pickers_configuration_are_as_their_sources_want_them() -> None:
    assert problems(the("InferencePool", documents()), POOL) == []
    assert problems(the("HTTPRoute", documents()), ROUTE) == []
    assert problems(config(), PICKING) == []
    for plugin in config()["plugins"]:
        assert problems(plugin.get("parameters", {}), PLUGINS[plugin["type"]], plugin["type"]) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda pool: pool["spec"].update(appProtocol="h2c"), ".spec.appProtocol: 'h2c'"),
        (lambda pool: pool["spec"].update(targetPort=1), ".spec.targetPort: unknown"),
        (lambda pool: pool["spec"].pop("selector"), ".spec.selector: missing"),
        (lambda pool: pool["spec"]["targetPorts"].clear(), ".spec.targetPorts: not a list of 1 to 8"),
        (lambda pool: pool["spec"]["endpointPickerRef"].pop("port"), ".spec.endpointPickerRef.port: missing"),
    ],
)
def test_the_rules_find_what_is_wrong(change: Any, problem: str) -> None:
    pool = yaml.safe_load(yaml.safe_dump(the("InferencePool", documents())))
    change(pool)
    assert problems(pool, POOL) == [problem]


def test_every_plugin_is_used_and_nothing_else_is_named() -> None:
    picking = config()
    plugins = {plugin.get("name", plugin["type"]) for plugin in picking["plugins"]}
    (profile,) = picking["schedulingProfiles"]
    parsers = {parser["pluginRef"] for parser in picking["requestHandler"]["parsers"]}
    used = {plugin["pluginRef"] for plugin in profile["plugins"]} | parsers
    # The source of figures and what reads them are taken by their types.
    assert plugins == used | {"metrics-data-source", "core-metrics-extractor"}
    assert parsers == {"passthrough-parser"}, "one that read bodies would refuse ours"
    (extractor,) = (plugin["parameters"] for plugin in picking["plugins"] if plugin["type"] == "core-metrics-extractor")
    assert extractor["defaultEngine"] in {engine["name"] for engine in extractor["engineConfigs"]}


def test_pool_picker_and_route_name_what_is_there() -> None:
    server = of_servers()
    ports = {port["name"]: port["containerPort"] for port in server["spec"]["containers"][0]["ports"]}
    pool = the("InferencePool", documents())
    assert pool["spec"]["selector"]["matchLabels"].items() <= server["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"] == [{"number": ports["grpc"]}]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    service = named("Service", pool["spec"]["endpointPickerRef"]["name"])
    picker = named("Deployment", "tessera-picker")["spec"]["template"]
    assert not pool["spec"]["selector"]["matchLabels"].items() <= picker["metadata"]["labels"].items()
    (container,) = picker["spec"]["containers"]
    own = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert own == {"picking": PICKING_PORT, "health": HEALTH_PORT, "metrics": METRICS_PORT}
    assert service["spec"]["selector"].items() <= picker["metadata"]["labels"].items()
    assert [(port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [(PICKING_PORT, "picking")]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == PICKING_PORT
    given = dict(word.split("=", 1) for word in container["args"])
    assert given.keys() <= OPTIONS
    assert given["--pool-name"] == pool["metadata"]["name"]
    assert given["--pool-group"] == pool["apiVersion"].partition("/")[0]
    assert given["--model-server-metrics-port"] == str(ports["metrics"])
    mount = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["picking"]
    assert given["--config-file"] == f"{mount}/picking.yaml"
    assert picker["spec"]["volumes"][0]["configMap"]["name"] == the("ConfigMap", documents())["metadata"]["name"]


def of_servers() -> dict[str, Any]:
    """The template of the servers' pods."""
    (deployment,) = (each for each in documents() if each["kind"] == "Deployment" and each["metadata"]["name"] == "tessera")
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


def test_the_route_leads_calls_of_one_answer_to_the_pool_and_all_else_for_callers_to_the_service() -> None:
    methods = {
        f"/{service.full_name}/{method.name}": method.client_streaming or method.server_streaming
        for service in inference_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    pooled, others = route_of(documents())
    assert {match["path"]["value"] for match in pooled["matches"]} == {name for name, streams in methods.items() if not streams}
    (backend,) = pooled["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", the("InferencePool", documents())["metadata"]["name"])
    prefixes = {match["path"]["value"] for match in others["matches"]}
    assert not any("Admin" in prefix or prefix == "/" for prefix in prefixes), "those inside alone"
    (backend,) = others["backendRefs"]
    (service,) = (each for each in documents() if each["kind"] == "Service" and each["metadata"]["name"] == backend["name"])
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
    assert {rule["timeouts"]["request"] for rule in (pooled, others)} == {"0s"}, "a call's own deadline ends it"


def test_gateway_and_picker_reach_the_servers_and_the_picker_may_read_what_it_must() -> None:
    servers, picker = named("NetworkPolicy", "tessera-pool")["spec"], named("NetworkPolicy", "tessera-picker")["spec"]
    labels = named("Deployment", "tessera-picker")["spec"]["template"]["metadata"]["labels"]
    (parent,) = the("HTTPRoute", documents())["spec"]["parentRefs"]
    proxies = {"gateway.networking.k8s.io/gateway-name": parent["name"]}
    assert servers["podSelector"]["matchLabels"].items() <= of_servers()["metadata"]["labels"].items()
    allowed = [(rule["from"][0]["podSelector"]["matchLabels"], rule["ports"][0]["port"]) for rule in servers["ingress"]]
    assert allowed == [(proxies, "grpc"), (labels, "metrics")]
    assert picker["podSelector"]["matchLabels"].items() <= labels.items()
    assert picker["ingress"][0] == {"from": [{"podSelector": {"matchLabels": proxies}}], "ports": [{"port": "picking"}]}
    assert picker["egress"][0]["to"] == [{"podSelector": servers["podSelector"]}]
    ports = {port["name"]: port["containerPort"] for port in of_servers()["spec"]["containers"][0]["ports"]}
    assert picker["egress"][0]["ports"] == [{"port": ports["metrics"]}]
    rules = the("Role", documents())["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}
    readable = {f"{resource}.{group}" for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    assert {"pods.", "inferencepools.inference.networking.k8s.io"} <= readable
    account = the("ServiceAccount", documents())["metadata"]["name"]
    assert named("Deployment", "tessera-picker")["spec"]["template"]["spec"]["serviceAccountName"] == account
    binding = the("RoleBinding", documents())
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "tessera"}]
    assert binding["roleRef"]["name"] == the("Role", documents())["metadata"]["name"]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as page:
        text: str = page.read().decode()
        return text


async def test_a_server_tells_the_figures_that_the_picker_looks_for() -> None:
    async with serving() as server:
        with contextlib.closing(server.metrics.listen("127.0.0.1", 0)) as endpoint:
            server.ranks.last_step = server.ranks.num_steps + 1
            call = server.inference.GenerateStream(request(tokens=8))
            await server.until_held()
            await server.until_stats(lambda stats: stats.kv_blocks_used > 0)
            page = await asyncio.to_thread(read, f"http://{endpoint.address}/metrics")
            call.cancel()
            server.ranks.last_step = None
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {name: families[name].samples for name in picker_series(documents())}
    assert len(values) == 3
    assert {families[name].type for name in values} == {"gauge"}
    # Without a timestamp the first of a family's series counts, so there must be one.
    assert {len(samples) for samples in values.values()} == {1}
    assert values["tessera_num_requests_running"][0].value == 1
    assert 0 < values["tessera_kv_usage_ratio"][0].value < 1


# What becomes of calls.


class Pool:
    """Servers behind a gateway and a picker."""

    def __init__(self, servers: list[RunningServer], picker: Picker, address: str, client: AsyncClient) -> None:
        self.servers = servers
        self.picker = picker
        self.address = address
        self.client = client

    def counts(self, method: str = "Generate", code: str = "OK") -> list[float]:
        return [server.count(method, code) for server in self.servers]

    async def ask(self, count: int) -> None:
        for _ in range(count):
            await self.client.generate([5, 6], max_new_tokens=2, ignore_eos=True)


@contextlib.asynccontextmanager
async def pool(folder: Path, rules: Sequence[dict[str, Any]] | None = None, number: int = 2) -> AsyncIterator[Pool]:
    """Servers, Envoy with the rules of our route or others, and the stand-in for the picker."""
    facts = {
        "facts": fake_facts(max_model_len=2 * LONG, num_blocks=LONG), "admission": {"max_queued_tokens": 20 * LONG}
    }  # fmt: skip
    async with contextlib.AsyncExitStack() as lives:
        servers = [await lives.enter_async_context(serving(**facts)) for _ in range(number)]
        figures = [lives.enter_context(contextlib.closing(each.metrics.listen("127.0.0.1", 0))).address for each in servers]
        addresses = [server.address for server in servers]
        pairs = list(zip(addresses, figures, strict=True))
        picker = await lives.enter_async_context(picking(pairs, picker_series(documents())))
        before = gateway(addresses, picker, rules or route_of(documents()), folder)
        address = await lives.enter_async_context(before)
        client = await lives.enter_async_context(AsyncClient(address, retries=0, timeout=60, options=ALONE))
        await client.wait_until_serving()
        yield Pool(servers, picker, address, client)


def all_to_the_pool() -> list[dict[str, Any]]:
    """Our route as it would be if streams and batches went to the pool too."""
    pooled, others = route_of(documents())
    return [pooled, others | {"backendRefs": pooled["backendRefs"]}]


@needs_extension
async def test_calls_of_every_kind_pass_the_gateway_unharmed(tmp_path: Path) -> None:
    async with pool(tmp_path) as behind:
        client = behind.client
        for prompt in ([5, 6], [LARGE_ID] * LONG):
            asked = request(tuple(prompt), 3, sampling={"seed": 1}, response={"echo": True})
            direct = await behind.servers[0].inference.Generate(asked)
            answer = await client.generate(prompt, max_new_tokens=3, ignore_eos=True, seed=1, echo=True)
            assert list(answer.completions[0].token_ids) == list(direct.completions[0].token_ids)
            assert list(answer.prompt.token_ids) == prompt
        assert len(await client.score([ScoreItem([5, 6, 7])])) == 1
        with pytest.raises(TesseraError) as said:
            await client.generate([5, 6], max_new_tokens=0)
        assert said.value.code == "INVALID_ARGUMENT"
        assert "max_new_tokens" in said.value.message
        done = await client.batch([Request([5, number], Options(max_new_tokens=2)) for number in range(6, 10)])
        assert not [each for each in done if isinstance(each, TesseraError)]
        assert sum(behind.counts("GenerateBatch")) == 1


@needs_extension
async def test_a_stream_comes_token_by_token_and_a_batch_is_answered_while_its_caller_writes(tmp_path: Path) -> None:
    async with pool(tmp_path, number=1) as behind, grpc.aio.insecure_channel(behind.address, ALONE) as channel:
        (server,) = behind.servers
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        server.ranks.last_step = server.ranks.num_steps + 1
        stream = stub.GenerateStream(request(tokens=4), timeout=60)
        assert (await stream.read()).HasField("prompt"), "it has come, and the steps are held"
        await server.until_held()
        server.ranks.last_step = None
        assert await code_of(stream) == "OK"
        batch = stub.GenerateBatch(timeout=60)
        for _ in range(2):
            await batch.write(request())
            assert (await batch.read()) is not grpc.aio.EOF
        await batch.done_writing()


@needs_extension
async def test_a_picker_that_reads_no_bodies_keeps_streams_and_batches_which_is_why_our_route_leaves_them_out(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path, all_to_the_pool(), number=1) as behind:
        (server,) = behind.servers
        async with grpc.aio.insecure_channel(behind.address, ALONE) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            server.ranks.last_step = server.ranks.num_steps + 1
            stream = stub.GenerateStream(request(tokens=4), timeout=60)
            first = asyncio.ensure_future(stream.read())
            await behind.picker.until_keeps("answer")
            await server.until_held()
            # An answer to what is asked later comes sooner, by the same connection.
            await models_pb2_grpc.ModelsStub(channel).ListModels(models_pb2.ListModelsRequest(), timeout=60)
            assert not first.done(), "the picker has what the server said, and the caller has nothing"
            server.ranks.last_step = None
            assert (await first).HasField("prompt")
            assert await code_of(stream) == "OK"
            batch = stub.GenerateBatch(timeout=60)
            await batch.write(request())
            await behind.picker.until_keeps("request")
            assert server.gateway.num_in_flight == 0, "it has the request, and no server has"
            await batch.done_writing()
            assert (await batch.read()) is not grpc.aio.EOF


@needs_extension
async def test_calls_go_where_least_waits_and_a_server_that_drains_gets_no_more(tmp_path: Path) -> None:
    async with pool(tmp_path, number=3) as behind:
        busy, idle, drained = behind.servers
        busy.ranks.last_step = busy.ranks.num_steps + 1
        held = [busy.inference.GenerateStream(request(tokens=8)) for _ in range(3)]
        await busy.until_held()
        await drained.gateway.drain()
        await behind.ask(10)
        assert behind.counts() == [0, 10, 0]
        busy.ranks.last_step = None
        for call in held:
            assert [event async for event in call]
        await idle.gateway.drain()
        await behind.ask(5)
        assert behind.counts() == [5, 10, 0]
        await busy.gateway.drain()
        with pytest.raises(TesseraError) as said:
            await behind.ask(1)
        assert said.value.code == "UNAVAILABLE"


@needs_extension
async def test_calls_go_on_when_the_picker_is_gone_and_the_gateway_knows_it(tmp_path: Path) -> None:
    async with pool(tmp_path) as behind:
        await behind.ask(2)
        await behind.picker.kill()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(TesseraError):
                    await behind.ask(1)
                    break
        before = sum(behind.counts())
        await behind.ask(10)
        assert sum(behind.counts()) == before + 10
