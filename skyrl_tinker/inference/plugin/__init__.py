"""Code that runs inside vLLM's processes: patches of the exact version that they are asserted against."""
