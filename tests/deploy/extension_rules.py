"""What the kinds of the Gateway API Inference Extension may say, for which ``kubernetes-validate`` has no schema.

From the sources of Gateway API Inference Extension 1.6.0 (InferencePool), Gateway API 1.6.1 (HTTPRoute) and llm-d-router 0.9.0
(EndpointPickerConfig, its plugins, options of its command): every field of a pool, and of the others those that ours have or
might.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Rule = Callable[[Any], bool] | dict[str, Any]
"""Of a value: what must be true of it, or the rules of an object's fields. A name with an exclamation mark is a must."""


@dataclass(frozen=True)
class Many:
    """Some values of one rule."""

    rule: Any
    most: int
    least: int = 1


def problems(value: Any, rule: Any, at: str = "") -> list[str]:
    """Where a value breaks a rule, by path."""
    if isinstance(rule, Many):
        if not isinstance(value, list) or not rule.least <= len(value) <= rule.most:
            return [f"{at}: not a list of {rule.least} to {rule.most}"]
        return [found for number, each in enumerate(value) for found in problems(each, rule.rule, f"{at}[{number}]")]
    if not isinstance(rule, dict):
        return [] if rule(value) else [f"{at}: {value!r}"]
    if not isinstance(value, dict):
        return [f"{at}: not an object"]
    rules = {name.rstrip("!"): each for name, each in rule.items()}
    found = [f"{at}.{name[:-1]}: missing" for name in rule if name.endswith("!") and name[:-1] not in value]
    found += [f"{at}.{name}: unknown" for name in value.keys() - rules.keys()]
    return found + [each for name in value.keys() & rules.keys() for each in problems(value[name], rules[name], f"{at}.{name}")]


def matching(pattern: str, most: int = 253) -> Callable[[Any], bool]:
    """Text of a pattern, at most so long."""
    return lambda value: isinstance(value, str) and len(value) <= most and re.fullmatch(pattern, value) is not None


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def anything(value: Any) -> bool:
    """Of values that other rules are about."""
    return True


NAME: Final = matching(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
GROUP: Final = matching(r"|[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
KIND: Final = matching(r"[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?", 63)
LABEL: Final = matching(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]|", 63)
PORT: Final = between(1, 65535)
TEXT: Final = matching(r"(?s).+", 1 << 20)
DURATION: Final = matching(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
PATH: Final = matching(r"/(?!.*(//|/\./|/\.\./|%2[fF]|#))[-A-Za-z0-9/._~!$&'()*+,;=:@%]*", 1024)
SERIES: Final = matching(
    r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-zA-Z_][a-zA-Z0-9_]*=\"?[^\",}]*\"?(,[a-zA-Z_][a-zA-Z0-9_]*=\"?[^\",}]*\"?)*\})?"
)


def labels(value: Any) -> bool:
    """Of a selector: one pair at least."""
    return isinstance(value, dict) and 1 <= len(value) <= 64 and all(LABEL(each) for each in value.values())


METADATA: Final = {"name!": NAME, "namespace": NAME, "labels": labels, "annotations": anything}
POOL: Final = {
    "apiVersion!": one_of("inference.networking.k8s.io/v1"),
    "kind!": one_of("InferencePool"),
    "metadata!": METADATA,
    "spec!": {
        "selector!": {"matchLabels!": labels},
        "targetPorts!": Many({"number!": PORT}, 8),
        "appProtocol": one_of("http", "kubernetes.io/h2c"),
        "endpointPickerRef": {
            "group": GROUP,
            "kind": KIND,
            "name!": NAME,
            "failureMode": one_of("FailOpen", "FailClose"),
            # Of a Service, which is what the reference is to where nothing else is said.
            "port!": {"number!": PORT},
        },
    },
}
REFERENCE: Final = {"group": GROUP, "kind": KIND, "name!": NAME, "namespace": NAME}
ROUTE: Final = {
    "apiVersion!": one_of("gateway.networking.k8s.io/v1"),
    "kind!": one_of("HTTPRoute"),
    "metadata!": METADATA,
    "spec!": {
        "parentRefs!": Many(REFERENCE | {"sectionName": NAME, "port": PORT}, 32),
        "hostnames": Many(NAME, 16),
        "rules!": Many(
            {
                "name": NAME,
                "matches": Many({"path": {"type!": one_of("Exact", "PathPrefix"), "value!": PATH}}, 64),
                "backendRefs": Many(REFERENCE | {"port": PORT, "weight": between(0, 1_000_000)}, 16),
                "timeouts": {"request": DURATION, "backendRequest": DURATION},
            },
            16,
        ),
    },
}
ENGINE: Final = {
    "name!": lambda value: TEXT(value) and value != "default",
    "queuedRequestsSpec": SERIES,
    "runningRequestsSpec": SERIES,
    "kvUsageSpec": SERIES,
    "loraSpec": SERIES,
    "cacheInfoSpec": SERIES,
}
PLUGINS: Final[dict[str, dict[str, Any]]] = {
    "passthrough-parser": {},
    "metrics-data-source": {"scheme": one_of("http", "https"), "path": PATH, "insecureSkipVerify": one_of(True, False)},
    "core-metrics-extractor": {"engineLabelKey": TEXT, "defaultEngine": TEXT, "engineConfigs": Many(ENGINE, 16)},
    "active-request-scorer": {"idleThreshold": between(0, 1 << 31), "maxBusyScore": between(0, 1)},
    "queue-scorer": {},
    "running-requests-size-scorer": {},
    "kv-cache-utilization-scorer": {},
    "session-affinity-scorer": {"headerName": TEXT, "profileName": TEXT},
    "max-score-picker": {"maxNumOfEndpoints": between(1, 1 << 31)},
}
"""Types of plugins, each with its parameters."""
POINTS: Final = {"pluginRef!": TEXT}
PICKING: Final = {
    "apiVersion!": one_of("llm-d.ai/v1alpha1"),
    "kind!": one_of("EndpointPickerConfig"),
    "featureGates": Many(TEXT, 16),
    "plugins!": Many({"name": TEXT, "type!": one_of(*PLUGINS), "parameters": anything}, 64),
    "schedulingProfiles!": Many({"name!": TEXT, "plugins!": Many(POINTS | {"weight": between(0, 1000)}, 64)}, 1),
    "requestHandler": {"parsers": Many(POINTS, 8)},
}
OPTIONS: Final = frozenset(
    {
        "--pool-name", "--pool-namespace", "--pool-group", "--config-file", "--config-text", "--grpc-port",
        "--grpc-health-port", "--metrics-port", "--metrics-endpoint-auth", "--model-server-metrics-port",
        "--refresh-metrics-interval", "--metrics-staleness-threshold", "--tracing", "--enable-pprof", "--secure-serving",
        "--cert-path", "--enable-cert-reload", "--ha-enable-leader-election", "--health-checking",
        "--disable-endpoint-subset-filter",
    }
)  # fmt: skip
"""Options of the picker's command."""
PICKING_PORT: Final = 9002
HEALTH_PORT: Final = 9003
METRICS_PORT: Final = 9090
