"""vLLM servers and their router as child processes: started, checked, replaced, ended."""
