"""Real SGLang on a CPU: its wheel and those that it imports, fetched without what they ask for."""
