"""Optimizer steps: AdamW and Dimuon, with the clipping that both share."""
