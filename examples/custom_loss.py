"""A loss of your own, run by the server: focal loss, which weighs a token less the better it is known.

The function is traced on the client and uploaded as a list of operations; docs/custom-losses.md lists those
that are allowed. Needs `tinker` and `torch`, and TINKER_BASE_URL and TINKER_API_KEY in the environment (see
README.md):

    python examples/custom_loss.py
"""

import argparse

import tinker
import torch
from tinker import types

GAMMA = 2.0
STEPS = 20


def focal(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one datum and its metrics; `weights` is the datum's input of that name."""
    probabilities = logprobs.exp()
    loss = -(weights * (1 - probabilities) ** GAMMA * logprobs).sum()
    return loss, {"custom/probability:mean": (weights * probabilities).sum() / weights.sum()}


def main() -> None:
    with tinker.ServiceClient(
        display_name="custom loss"
    ) as service:  # its models leave the server at the end
        learn(service)


def learn(service: tinker.ServiceClient) -> None:
    model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=model, rank=32, seed=0).result()
    tokenizer = training.get_tokenizer()
    data = [datum(tokenizer.encode(text)) for text in ("red green blue", "one two three")]

    # The number of dimensions of each parameter: 1 for one value per token.
    loss_fn = service.create_custom_loss(focal, {"logprobs": 1, "weights": 1}).result()
    for step in range(STEPS):
        passed = training.forward_backward_custom(data, loss_fn)
        training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        metrics = passed.result().metrics
        loss, probability = metrics["loss:sum"], metrics["custom/probability:mean"]
        print(f"step {step}: loss {loss:.4f}, probability {probability:.4f}")


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
