"""What the launcher for Ray does when programs end and when it is told to, with a stand-in for Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.launchers import ray_nodes
from deploy.launchers.ray_job import LaunchError, parse

JOB = parse(["key", "--ray", "10.0.0.1:6379", "--nodes", "2", "--", "--model", "m"])


@pytest.fixture(autouse=True)
def _again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "_AGAIN_SECONDS", 0)


class LostActor(Exception):
    """Stands for ``RayActorError``."""


Ending = int | type[LostActor]


def remote(does: Callable[..., Any]) -> SimpleNamespace:
    """A method or a class, called as Ray has it."""
    return SimpleNamespace(remote=does)


class Actor:
    """An actor whose program ends as the test has it, with a code or by the loss of its node, or with 0 at a signal."""

    def __init__(self, ray: Ray, node: int) -> None:
        self.look, self.run, self.tell = remote(self._look), remote(self._run), remote(self._tell)
        self.told: list[int] = []
        self.commands: list[list[str]] = []
        self._ray, self._node = ray, node
        self._endings: asyncio.Queue[Ending] = asyncio.Queue()

    def end(self, how: Ending) -> None:
        self._endings.put_nowait(how)

    async def _look(self, key_file: str) -> tuple[str, list[str], str]:
        return f"10.0.0.{self._node + 1}", self._ray.interfaces, self._ray.lacks

    async def _run(self, command: list[str], folder: str) -> AsyncIterator[Any]:
        self.commands.append(command)
        if not isinstance(how := await self._endings.get(), int):
            raise how
        yield asyncio.sleep(0, how)

    def _tell(self, number: int) -> None:
        self.told.append(number)
        self.end(0)


class Ray:
    """What the launcher uses of Ray."""

    def __init__(self, address: str = "10.0.0.1", *, has_room: bool = True) -> None:
        self.actors: list[Actor] = []
        self.groups: list[Any] = []
        self.interfaces: list[str] = []
        self.lacks = ""
        self.exceptions = SimpleNamespace(RayActorError=LostActor)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, node: node)
        self.util = SimpleNamespace(
            placement_group=self._place, remove_placement_group=self.groups.remove, scheduling_strategies=strategies
        )
        self._address, self._has_room = address, has_room

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": "8.8.4.4", "Alive": False}, {"NodeManagerAddress": self._address, "Alive": True}]

    def kill(self, actor: Actor) -> None:
        actor.told.append(signal.SIGKILL)

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **given: remote(lambda: self._actor(given["scheduling_strategy"])))

    def _actor(self, node: int) -> Actor:
        self.actors.append(Actor(self, node))
        return self.actors[-1]

    def _place(self, bundles: list[dict[str, float]], **_: str) -> Any:
        self.groups.append(SimpleNamespace(ready=lambda: asyncio.sleep(0) if self._has_room else asyncio.Event().wait()))
        return self.groups[-1]


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for sets no event
            await asyncio.sleep(0)


async def begun(ray: Ray) -> asyncio.Task[int]:
    """A launch whose server and agent run: the first two actors."""
    task = asyncio.create_task(ray_nodes.Launch(JOB, ray).run())
    await reached(lambda: task.done() or (len(ray.actors) == 2 and all(actor.commands for actor in ray.actors)))
    return task


async def test_nothing_is_placed_on_a_cluster_that_all_the_world_may_reach() -> None:
    ray = Ray("8.8.8.8")
    with pytest.raises(LaunchError, match=r"node 8\.8\.8\.8 of the Ray cluster"):
        await ray_nodes.Launch(JOB, ray).run()
    assert (ray.actors, ray.groups) == ([], [])


@pytest.mark.parametrize(("interfaces", "lacks", "says"), [(["8.8.8.8"], "", r"\(8\.8\.8\.8\)"), ([], "no key", "has no key")])
async def test_nothing_runs_on_machines_that_break_a_rule(interfaces: list[str], lacks: str, says: str) -> None:
    ray = Ray()
    ray.interfaces, ray.lacks = interfaces, lacks
    with pytest.raises(LaunchError, match=says):
        await ray_nodes.Launch(JOB, ray).run()
    assert (len(ray.actors), [actor.commands for actor in ray.actors], ray.groups) == (2, [[], []], [])


async def test_an_agent_that_was_killed_or_lost_runs_again_until_the_server_ends() -> None:
    ray = Ray()
    launch = await begun(ray)
    server, agent = ray.actors
    agent.end(-9)
    await reached(lambda: len(agent.commands) == 2)
    agent.end(LostActor)
    await reached(lambda: len(ray.actors) == 3 and bool(ray.actors[2].commands))
    assert ray.actors[2].commands == agent.commands[:1] == [JOB.command(1, "10.0.0.1")]
    server.end(7)
    assert await launch == 7
    assert (server.told, agent.told, ray.actors[2].told, ray.groups) == ([], [signal.SIGKILL], [signal.SIGTERM], [])


async def test_an_agent_that_ends_by_itself_has_the_server_drain_and_is_told_of() -> None:
    ray = Ray()
    launch = await begun(ray)
    server, agent = ray.actors
    agent.end(1)
    with pytest.raises(LaunchError, match="the agent of node 1 ended with 1"):
        await launch
    assert (server.told, ray.groups) == ([signal.SIGTERM], [])


@pytest.mark.parametrize(
    ("how", "expected"), [(-9, 137), (LostActor, r"node 0 \(10\.0\.0\.1\) was lost, and the server with it")]
)
async def test_the_server_s_end_is_the_launch_s(how: Ending, expected: int | str) -> None:
    ray = Ray()
    launch = await begun(ray)
    ray.actors[0].end(how)
    if isinstance(expected, int):
        assert await launch == expected
    else:
        with pytest.raises(LaunchError, match=expected):
            await launch
    assert (ray.actors[1].told, ray.groups) == ([signal.SIGTERM], [])


@pytest.mark.parametrize(
    ("number", "passed_on"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGTERM)]
)
async def test_a_signal_goes_to_the_server_and_ends_what_has_not_begun(number: int, passed_on: int) -> None:
    ray = Ray()
    launch = await begun(ray)
    os.kill(os.getpid(), number)
    assert await launch == 0
    assert [actor.told for actor in ray.actors] == [[passed_on], [signal.SIGTERM]]
    full = Ray(has_room=False)
    launch = asyncio.create_task(ray_nodes.Launch(JOB, full).run())
    await reached(lambda: bool(full.groups))
    os.kill(os.getpid(), number)
    with pytest.raises(LaunchError, match="ended before the server was started") as ended:
        await launch
    assert (ended.value.code, full.actors, full.groups) == (128 + passed_on, [], [])
