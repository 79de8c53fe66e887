"""Telemetry of the engine.

Counters and histograms for `/metrics`, some by owner; the activity of the last minutes for the dashboard and
its trace; and spans for an OpenTelemetry collector.
"""
