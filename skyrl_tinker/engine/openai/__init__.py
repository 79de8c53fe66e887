"""OpenAI-compatible completions and chat on the samplers."""
