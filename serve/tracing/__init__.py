"""Traces of calls: what is told to a tracer and by whom, and OpenTelemetry's, which is imported where traces are asked for."""
