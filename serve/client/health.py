"""``tessera-health``: whether a server serves, or lives, as an exit code for probes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.client.calls import SERVING
from serve.client.connection import Connection, add_arguments, connecting_of

LIVENESS = "liveness"
WELL, NOT_WELL, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once.

    Returns:
        0 for SERVING; 1 for anything else, also where nothing answers in time; 2 for usage.
    """
    parser = argparse.ArgumentParser(prog="tessera-health", description="Ask a server for its health: exit code 0 if well.")
    parser.add_argument(
        "--live", action="store_true", help="whether the process works at all, and not whether it serves: for liveness probes"
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for the answer (5)")
    add_arguments(parser)
    try:
        options = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said what is wrong
        return int(end.code or 0)
    try:
        connection = Connection.of(options.address, connecting_of(options))
    except ValueError as error:
        print(f"tessera-health: {error}", file=sys.stderr)
        return USAGE
    request = health_pb2.HealthCheckRequest(service=LIVENESS if options.live else "")
    with connection.channel() as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options.timeout, metadata=connection.metadata)
        except grpc.RpcError as error:
            print(f"tessera-health: {connection.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return NOT_WELL
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return WELL if answer.status == SERVING else NOT_WELL
