"""Placement of state in memory: device cache, offload to the host, budget, state kept for restarts."""
