"""Saves of every kind: training checkpoints, weights for samplers, external exports."""
