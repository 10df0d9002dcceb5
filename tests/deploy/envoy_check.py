"""``python envoy_check.py FILE``: reads a configuration as Envoy's own messages, which xds-protos has, field by field."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from envoy.config.bootstrap.v3 import bootstrap_pb2  # type: ignore[import-not-found]
from envoy.extensions.filters.http.router.v3 import router_pb2  # type: ignore[import-not-found] # noqa: F401
from envoy.extensions.filters.network.http_connection_manager.v3 import (  # type: ignore[import-not-found]
    http_connection_manager_pb2,
)
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2  # type: ignore[import-not-found] # noqa: F401
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2  # type: ignore[import-not-found]
from google.protobuf import json_format


def main(file: str) -> int:
    """Raises where a field is unknown or of another type; prints the clusters and what the routes name."""
    bootstrap = json_format.ParseDict(yaml.safe_load(Path(file).read_text()), bootstrap_pb2.Bootstrap())
    manager = http_connection_manager_pb2.HttpConnectionManager()
    any_manager = bootstrap.static_resources.listeners[0].filter_chains[0].filters[0].typed_config
    assert any_manager.Unpack(manager)
    clusters = {cluster.name: cluster for cluster in bootstrap.static_resources.clusters}
    for name, cluster in clusters.items():
        options = http_protocol_options_pb2.HttpProtocolOptions()
        (packed,) = cluster.typed_extension_protocol_options.values()
        assert packed.Unpack(options)
        assert options.explicit_http_config.HasField("http2_protocol_options"), "gRPC is HTTP/2"
        assert cluster.health_checks[0].HasField("grpc_health_check")
        assert cluster.load_assignment.cluster_name == name
    (host,) = manager.route_config.virtual_hosts
    for route in host.routes:
        assert route.route.cluster in clusters
        assert route.route.HasField("timeout"), "else Envoy ends a call after 15 s"
        assert not route.route.timeout.ToNanoseconds(), "a call's own deadline ends it"
    print(" ".join(f"{route.route.cluster}={clusters[route.route.cluster].lb_policy}" for route in host.routes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
