"""Our side of vLLM's HTTP interface: one routed data plane, one control plane over all replicas."""
