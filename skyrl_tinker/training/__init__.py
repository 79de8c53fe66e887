"""The trainer: FSDP2 ranks under Ray that hold one frozen base model and the state of every trained model.

In: batches of checked datums, optimizer steps, saves and loads, through `trainer_group.TrainerGroup`, the
only class that the engine uses. Out: logprobs, metrics, files. Imports `domain`, `errors`, `processes` and
`atomic_directory`; nothing of HTTP, the store or the samplers.
"""
