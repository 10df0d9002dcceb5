"""One model over nodes of a Ray cluster that runs already: the server on the first, an agent on each other.

    python -m deploy.launchers.ray_nodes KEY_FILE --ray auto --nodes 2 --gpus-per-node 4 -- --model DIR --tensor-parallel-size 8

It starts no Ray: that opens ports on every address of a machine, and whoever reaches them runs programs there. SIGTERM and
SIGINT go to the server, which drains, and its exit code is this program's. See docs/several-machines.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

from deploy.launchers import ray_actor
from deploy.launchers.ray_job import MISTAKE, Job, LaunchError, check_reach, parse

_AGAIN_SECONDS: Final = 1.0
_END_SECONDS: Final = 20.0
_REACH_SECONDS: Final = 5.0


class Launch:
    """One launch, from the placement to the end of the server."""

    def __init__(self, job: Job, ray: Any) -> None:
        self._job, self._ray = job, ray
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        """By node, those that run a program."""
        self._address = ""
        self._ending = False

    async def run(self) -> int:
        """The whole of it; returns the server's exit code.

        Raises:
            LaunchError: it cannot begin, or an agent or the server's node is gone for good.
        """
        main = asyncio.current_task()
        assert main is not None
        told: list[int] = []

        def tell(number: int) -> None:
            told.append(number)
            if 0 in self._actors:
                self._tell(0, number)
            elif not self._ending:
                main.cancel()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, tell, signal.SIGTERM if number == signal.SIGHUP else number)
        try:
            return await self._run()
        except asyncio.CancelledError:
            raise LaunchError("ended before the server was started", 128 + told[0]) from None
        finally:
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)

    async def _run(self) -> int:
        nodes = [(node["NodeManagerAddress"], ()) for node in self._alive()]
        check_reach(nodes, self._job.insecure_public)
        await self._place()
        placed = await asyncio.gather(*map(self._placed, range(self._job.nodes)))
        (server, self._address), *others = placed
        serving = asyncio.create_task(self._serve(server))
        agents = {asyncio.create_task(self._keep_agent(number, actor)) for number, (actor, _) in enumerate(others, 1)}
        failures: list[BaseException] = []
        while not serving.done():
            done, _ = await asyncio.wait({serving, *agents}, return_when=asyncio.FIRST_COMPLETED)
            if failed := done & agents:
                agents -= failed
                if not failures:
                    self._tell(0, signal.SIGTERM)
                failures += [error for task in failed if (error := task.exception()) is not None]
        await self._end_agents(agents)
        if failures:
            raise failures[0]
        return serving.result()

    async def _place(self) -> None:
        """Wait for as many nodes as are asked for, each with room.

        Raises:
            LaunchError: they did not come in time.
        """
        job = self._job
        bundle = {name: many for name, many in (("CPU", job.cpus), ("GPU", job.gpus)) if many}
        self._group = self._ray.util.placement_group([bundle] * job.nodes, strategy="STRICT_SPREAD", name="tessera")
        try:
            await asyncio.wait_for(self._group.ready(), job.wait_seconds)
        except TimeoutError:
            num_alive = len(self._alive())
            waited = f"after {job.wait_seconds:.0f} s (--wait-seconds)"
            if num_alive < job.nodes:
                raise LaunchError(f"--nodes asks for {job.nodes} nodes, and the Ray cluster has {num_alive} {waited}") from None
            raise LaunchError(
                f"the Ray cluster has {num_alive} nodes, and {waited} no {job.nodes} of them have {job.cpus:g} CPUs and "
                f"{job.gpus:g} GPUs free (--cpus-per-node, --gpus-per-node)"
            ) from None

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    async def _placed(self, number: int) -> tuple[Any, str]:
        """An actor on a node, as soon as Ray has one, and that node's address; nothing of Tessera runs there yet.

        Raises:
            LaunchError: the node may be reached by everybody, or lacks what it needs.
        """
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
        actor = (
            self._ray.remote(ray_actor.OnNode)
            .options(num_cpus=self._job.cpus, num_gpus=self._job.gpus, max_concurrency=3, scheduling_strategy=placed)
            .remote()
        )
        address, interfaces, lacks = await actor.look.remote(self._job.key_file)
        check_reach([(address, interfaces)], self._job.insecure_public)
        if lacks:
            raise LaunchError(f"node {address} has {lacks}", MISTAKE)
        _say(f"node {number} is {address}")
        return actor, address

    async def _serve(self, actor: Any) -> int:
        try:
            code = await self._follow(0, actor)
        except self._ray.exceptions.RayActorError:
            raise LaunchError(f"node 0 ({self._address}) was lost, and the server with it") from None
        return code if code >= 0 else 128 - code

    async def _keep_agent(self, number: int, actor: Any) -> None:
        """Run the agent of a node again and again, on another one where Ray has lost it.

        Raises:
            LaunchError: it ended by itself, as it does after a mistake.
        """
        while not self._ending:
            try:
                if actor is None:
                    actor, _ = await self._placed(number)
                code = await self._follow(number, actor)
            except self._ray.exceptions.RayActorError:
                if actor is not None:  # else the node was lost that it was to have now
                    _say(f"node {number} was lost; its agent is started again when Ray has a node for it")
                    self._ray.kill(actor)  # which may only be out of reach
                actor = None
            else:
                if self._ending:
                    return
                if code >= 0:  # by a signal it would be below
                    raise LaunchError(f"the agent of node {number} ended with {code}")
                _say(f"the agent of node {number} was killed by signal {-code}, and is started again")
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self, number: int, actor: Any) -> int:
        """Have an actor run its node's program, and say what that says; returns its exit code."""
        self._actors[number] = actor
        try:
            async for told in actor.run.remote(self._job.command(number, self._address), os.getcwd()):
                if isinstance(said := await told, int):
                    return said
                _write(*said)
            raise LaunchError(f"the program of node {number} ended without an exit code")
        finally:
            del self._actors[number]

    def _tell(self, number: int, what: int) -> None:
        if (actor := self._actors.get(number)) is not None:
            actor.tell.remote(what)

    async def _end_agents(self, agents: set[asyncio.Task[None]]) -> None:
        """Have them end now that the server has; what takes too long, or waits for a node, goes with the placement."""
        self._ending = True
        for number in self._actors:
            self._tell(number, signal.SIGTERM)
        if agents:
            await asyncio.wait(agents, timeout=_END_SECONDS if self._actors else 0)
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


def _say(text: str) -> None:
    print(f"ray_nodes: {text}", file=sys.stderr, flush=True)


def _write(descriptor: int, said: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the server goes on
        while said:
            said = said[os.write(descriptor, said) :]


def connect(address: str) -> Any:
    """Ray's module, joined with the cluster.

    Raises:
        LaunchError: Ray is not installed, or no cluster is there.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name!r} is not installed; pip install ray, of the cluster's version, brings it") from None
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(f"no Ray cluster was joined at {address} (--ray): {error}") from None
    ray.cloudpickle.register_pickle_by_value(ray_actor)
    return ray


def main(words: Sequence[str]) -> int:
    """Launch, and stay until the server ends; returns the exit code."""
    try:
        job = parse(words)
        ray = connect(job.ray)
        try:
            return asyncio.run(Launch(job, ray).run())
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray failed: {error}") from None
        finally:
            ray.shutdown()
    except LaunchError as error:
        _say(str(error))
        return error.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
