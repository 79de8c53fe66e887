"""The trainer's side of the engine: prepares passes, runs units on the ranks, creates models."""
