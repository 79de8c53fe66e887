"""Supervised fine-tuning: a model learns the answers to four questions, and then gives them.

Needs `tinker`, and TINKER_BASE_URL and TINKER_API_KEY in the environment (see README.md):

    python examples/sft.py
"""

import argparse

import numpy as np
import tinker
from tinker import types

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}
STEPS = 40


def main() -> None:
    with tinker.ServiceClient(display_name="supervised") as service:  # its models leave the server at the end
        learn(service)


def learn(service: tinker.ServiceClient) -> None:
    model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=model, rank=32, seed=0).result()
    tokenizer = training.get_tokenizer()
    questions = {f"Capital of {country}? ": capital for country, capital in CAPITALS.items()}
    data = [
        datum(tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for question, answer in questions.items()
    ]
    answer_tokens = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data)

    for step in range(STEPS):
        # Send both requests, then wait: the server runs them in this order without a pause between them.
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))
        loss = passed.result().metrics["loss:sum"] / answer_tokens
        stepped.result()
        print(f"step {step}: loss per token {loss:.4f}")

    sampler = training.save_weights_and_get_sampling_client().result()
    for question in questions:
        prompt = types.ModelInput.from_ints(tokenizer.encode(question))
        greedy = types.SamplingParams(max_tokens=16, temperature=0)
        response = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result()
        print(question + tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True))


def datum(question: list[int], answer: list[int]) -> types.Datum:
    """Return a datum whose loss counts the answer only: position i of the input predicts target i."""
    tokens = [*question, *answer]
    weights = np.array([0.0] * (len(question) - 1) + [1.0] * len(answer), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
