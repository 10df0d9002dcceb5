"""What a launch by Ray is asked for, and the rules that it keeps to. Nothing here needs Ray."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import re
from collections.abc import Sequence
from typing import Final

DEFAULT_PORT: Final = 50060
OURS: Final = ("--nodes", "--agents-listen", "--agents-key-file")
"""Options of tessera-serve that the launcher gives."""
CLOSED: Final = ("127.0.0.1", "::1")
"""Addresses of nodes whose Ray listens on loopback alone."""
ERROR, MISTAKE = 1, 2


class LaunchError(Exception):
    """What keeps the launch from going on, for the user; ``code`` is what this program ends with."""

    def __init__(self, message: str, code: int = ERROR) -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Job:
    """What the user asks for."""

    key_file: str
    """On every node; absolute."""
    ray: str
    """``auto`` or HOST:PORT."""
    nodes: int
    cpus: float
    """Of each node, as are ``gpus``."""
    gpus: float
    port: int
    """At which agents join."""
    wait_seconds: float
    insecure_public: bool
    options: tuple[str, ...]
    """For tessera-serve."""

    def command(self, node: int, address: str) -> list[str]:
        """What runs on a node; ``address`` is that of the first."""
        at = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"
        if node:
            return ["tessera-serve", "agent", "--join", at, "--node", str(node), "--key-file", self.key_file]
        given = ["--nodes", str(self.nodes), "--agents-listen", at, "--agents-key-file", self.key_file]
        return ["tessera-serve", *self.options, *given]


def parse(words: Sequence[str]) -> Job:
    """Read the command line; ``--help`` and what argparse refuses end the program.

    Raises:
        LaunchError: an option breaks a rule.
    """
    cut = list(words).index("--") if "--" in words else len(words)
    given, options = _parser().parse_args(words[:cut]), list(words[cut + 1 :])
    if given.nodes < 2:
        raise LaunchError(f"--nodes is {given.nodes}; it must be 2 or more: one machine needs no launcher", MISTAKE)
    if given.cpus_per_node < 0 or given.gpus_per_node < 0 or not given.cpus_per_node + given.gpus_per_node:
        raise LaunchError("--cpus-per-node and --gpus-per-node must be 0 or more, and one of them more than 0", MISTAKE)
    for option in options:
        if (name := option.partition("=")[0]) in OURS:
            raise LaunchError(f"{name} is given to tessera-serve by this launcher; leave it out after --", MISTAKE)
    if not options:
        raise LaunchError("the options of tessera-serve are missing; they come after --", MISTAKE)
    return Job(
        key_file=os.path.abspath(given.key_file),
        ray=cluster_address(given.ray),
        nodes=given.nodes,
        cpus=given.cpus_per_node,
        gpus=given.gpus_per_node,
        port=given.agents_port,
        wait_seconds=given.wait_seconds,
        insecure_public=given.insecure_public,
        options=tuple(options),
    )


def cluster_address(given: str) -> str:
    """Where the cluster is, by ``--ray`` or, for ``auto``, by the variable that Ray itself would read.

    Raises:
        LaunchError: Ray would start a cluster of its own, or be a client of one.
    """
    told = os.environ.get("RAY_ADDRESS") or given if given == "auto" else given
    if told != "auto" and not re.fullmatch(r"[^\s/]+:\d+", told):
        where = "--ray" if told == given else "RAY_ADDRESS"
        raise LaunchError(
            f"{where} is {told!r}; it must be auto or HOST:PORT, a cluster of which this machine is a node", MISTAKE
        )
    return told


def exposed(address: str, interfaces: Sequence[str]) -> list[str]:
    """Addresses of a node at which everybody may reach its Ray: those that are routed globally, and those that are none.

    Args:
        address: by which Ray knows the node. Of a node on loopback it is the only one.
    """
    return [each for each in dict.fromkeys((address, *(() if address in CLOSED else interfaces))) if _is_public(each)]


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return True


def check_reach(nodes: Sequence[tuple[str, Sequence[str]]], insecure_public: bool) -> None:
    """Refuse a cluster that may be reached by everybody.

    Args:
        nodes: the address of each, and all addresses of its machine as far as they are known.

    Raises:
        LaunchError: a node has such an address, and ``insecure_public`` is not given.
    """
    for address, interfaces in nodes:
        if (public := exposed(address, interfaces)) and not insecure_public:
            raise LaunchError(
                f"node {address} of the Ray cluster has an address that all the world may reach ({', '.join(public)}). Ray "
                "listens on every address, and whoever reaches it runs programs there: have Ray on a private network, or give "
                "--insecure-public where a firewall keeps others out",
                MISTAKE,
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.launchers.ray_nodes",
        usage="%(prog)s KEY_FILE --ray ADDRESS --nodes N [options] -- [options of tessera-serve]",
        description="Run tessera-serve on one node of a Ray cluster that runs already, and its agents on others.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("key_file", metavar="KEY_FILE", help="The key of server and agents: the same file on every node.")
    add("--ray", required=True, metavar="ADDRESS", help="The cluster: auto, the one of this machine, or HOST:PORT.")
    add("--nodes", required=True, type=int, metavar="N", help="How many nodes the model is shared among.")
    add(
        "--cpus-per-node",
        type=float,
        default=1.0,
        metavar="C",
        help="CPUs to have of each node, as Ray counts them. (default: 1)",
    )
    add(
        "--gpus-per-node",
        type=float,
        default=0.0,
        metavar="G",
        help="GPUs to have of each; ranks then see no others. (default: 0)",
    )
    add("--agents-port", type=int, default=DEFAULT_PORT, metavar="PORT", help=f"Where agents join. (default: {DEFAULT_PORT})")
    add("--wait-seconds", type=float, default=60.0, metavar="S", help="For the nodes, at the start. (default: 60)")
    add("--insecure-public", action="store_true", help="Use a cluster whose nodes have addresses that all the world may reach.")
    return parser
