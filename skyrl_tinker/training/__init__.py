"""The trainer: FSDP2 ranks under Ray that hold one frozen base model and every model's own state.

In: batches of checked datums, optimizer steps, saves and loads, through `trainer_group.TrainerGroup`, which
is all that the engine sees. Out: logprobs, metrics, files. Imports `domain`, `errors`, `processes` and
`atomic_directory`; nothing of HTTP, the store or the samplers.
"""
