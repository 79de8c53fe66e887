"""API keys, session tokens and signed URLs."""
