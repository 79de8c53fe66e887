"""Sampling through the OpenAI-compatible routes: a streamed chat, and a completion by a model in training.

Needs `openai` and `tinker`, and TINKER_BASE_URL and TINKER_API_KEY in the environment (see README.md):

    python examples/openai_client.py
"""

import argparse
import os

import openai
import tinker

QUESTION = "What is two plus two?"


def main() -> None:
    client = openai.OpenAI(
        base_url=f"{os.environ['TINKER_BASE_URL']}/oai/api/v1", api_key=os.environ["TINKER_API_KEY"]
    )
    models = [model.id for model in client.models.list()]
    print("models:", *models)

    chat = client.chat.completions.create(
        model=models[0],
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=32,
        temperature=0,
        stream=True,
    )
    print("chat: ", end="")
    for chunk in chat:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    # The path of saved sampler weights is a model name too, in every route.
    with tinker.ServiceClient(display_name="an OpenAI client") as service:
        training = service.create_lora_training_client(base_model=models[0], rank=8).result()
        path = training.save_weights_for_sampler("for-openai").result().path
    completion = client.completions.create(model=path, prompt="2+2=", max_tokens=8, temperature=0)
    print(f"completion of {completion.model}: {completion.choices[0].text}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
