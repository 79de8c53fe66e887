"""Comparison of trainer and samplers: the same tokens scored by both, at start and after each sync."""
