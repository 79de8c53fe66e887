"""Checkpoints: train, save, and resume in a new session; the resumed run repeats the first run's losses.

Needs `tinker`, and TINKER_BASE_URL and TINKER_API_KEY in the environment (see README.md):

    python examples/resume.py
"""

import argparse

import tinker
from tinker import types

TEXT = "The quick brown fox jumps over the lazy dog."
STEPS = 5


def main() -> None:
    with tinker.ServiceClient(display_name="resume: before") as service:
        model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
        training = service.create_lora_training_client(base_model=model, rank=32, seed=0).result()
        train(training)
        # A checkpoint holds the weights and the optimizer's state; its path is all that a new session needs.
        checkpoint = training.save_state("half-way").result().path
        print(f"saved {checkpoint}")
        continued = train(training)
    with tinker.ServiceClient(display_name="resume: after") as service:
        resumed = train(service.create_training_client_from_state_with_optimizer(checkpoint).result())
    for step, (first, second) in enumerate(zip(continued, resumed, strict=True)):
        print(f"step {step}: continued {first!r}, resumed {second!r}")


def train(training: tinker.TrainingClient) -> list[float]:
    """Take STEPS optimizer steps; return the losses before each."""
    tokens = training.get_tokenizer().encode(TEXT)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    passes = []
    for _ in range(STEPS):
        passes.append(training.forward_backward([datum], "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return [result.result().metrics["loss:sum"] for result in passes]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
