"""Long polls: results as they finish, and until then what a request waits for."""
