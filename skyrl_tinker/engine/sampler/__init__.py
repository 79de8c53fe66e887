"""The samplers' side of the engine: requests in flight, replicas, adapters and weights that they hold."""
