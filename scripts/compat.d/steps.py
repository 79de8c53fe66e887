"""Training, saving, loading, sampling, in the order of a user's day."""

import importlib.util
import pickle

from tinker import types
from world import (
    TOKENS,
    TOLERANCE,
    Run,
    UnavailableError,
    close,
    datum,
    done,
    sample,
    scored,
    step,
    train,
)


@step()
def capabilities(run: Run) -> None:
    answer = done(run.service.get_server_capabilities())
    assert run.model in [model.model_name for model in answer.supported_models]


@step()
def create(run: Run) -> None:
    assert run.info.model_id == run.run_id
    assert run.info.model_data.model_name == run.model


@step()
def train_steps(run: Run) -> None:
    losses = [train(run.training) for _ in range(4)]
    assert losses[-1] < losses[0], losses


@step()
def forward(run: Run) -> None:
    values = scored(run.training)
    assert len(values) == len(TOKENS) - 1
    backward = done(run.training.forward_backward([datum(TOKENS)], "cross_entropy"))
    close(backward.loss_fn_outputs[0]["logprobs"].tolist(), values)
    assert abs(backward.metrics["loss:sum"] + sum(values)) < TOLERANCE * len(values)
    done(run.training.optim_step(types.AdamParams(learning_rate=0.0)))


@step()
def chunks(run: Run) -> None:
    """More data than one request of any version holds, answered in order."""
    data = [datum([index % 5 + 3, 4]) for index in range(1100)]
    backward = run.training.forward_backward(data, "cross_entropy")
    update = run.training.optim_step(types.AdamParams(learning_rate=0.0))
    values = [output["logprobs"].tolist()[0] for output in done(backward).loss_fn_outputs]
    done(update)
    close(values, values[:5] * 220)
    assert len({round(value, 3) for value in values[:5]}) > 1


@step()
def rl_losses(run: Run) -> None:
    quantity = len(TOKENS) - 1
    data = [datum(TOKENS, logprobs=scored(run.training), advantages=[1.0] * quantity)]
    for loss in ("importance_sampling", "ppo"):
        output = done(run.training.forward_backward(data, loss))
        assert abs(output.metrics["loss:sum"] + quantity) < TOLERANCE * quantity, output.metrics
    done(run.training.optim_step(types.AdamParams(learning_rate=0.0)))


@step(since="0.6")
def loss_config(run: Run) -> None:
    data = [datum(TOKENS, logprobs=scored(run.training), advantages=[1.0] * (len(TOKENS) - 1))]
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 0.5}
    output = done(run.training.forward_backward(data, "cispo", loss_fn_config=config))
    expected = -0.5 * sum(scored(run.training))
    assert abs(output.metrics["loss:sum"] - expected) < 0.1, (output.metrics, expected)
    done(run.training.optim_step(types.AdamParams(learning_rate=0.0)))


@step()
def custom_loss(run: Run) -> None:
    """On the client; most versions come without torch, which it needs."""
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("needs torch")
    expected = scored(run.training)
    wanted = run.training.forward_backward_custom(
        [datum(TOKENS)], lambda _, logprobs: (-logprobs[0].sum() / 2, {"half": 0.5})
    )
    metrics = done(wanted).metrics
    assert metrics["half"] == 0.5, metrics
    assert abs(metrics["loss:sum"] + sum(expected) / 2) < TOLERANCE * len(expected), metrics
    done(run.training.optim_step(types.AdamParams(learning_rate=0.0)))


@step(since="0.7")
def decay_and_clip(run: Run) -> None:
    done(run.training.forward_backward([datum(TOKENS)], "cross_entropy"))
    params = types.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=0.5)
    done(run.training.optim_step(params))


@step()
def save_and_load(run: Run) -> None:
    before = scored(run.training)
    path = run.saved
    assert path == f"tinker://{run.run_id}/weights/{run.name}"
    train(run.training)
    done(run.training.load_state(path))
    close(scored(run.training), before)


@step()
def resume(run: Run) -> None:
    resumed = done(run.service.create_training_client_from_state(run.saved))
    close(scored(resumed), scored(run.training))
    train(resumed)


@step(since="0.6")
def resume_with_optimizer(run: Run) -> None:
    resumed = done(run.service.create_training_client_from_state_with_optimizer(run.saved))
    close(scored(resumed), scored(run.training))
    train(resumed)


@step(since="0.24")
def resume_full_parameters(run: Run) -> None:
    """Rank 0 is this server's own; older versions insist on a LoRA rank when they resume."""
    whole = done(run.service.create_lora_training_client(base_model=run.model, rank=0))
    train(whole, learning_rate=1e-3)
    path = done(whole.save_state(name=f"{run.name}-full")).path
    resumed = done(run.service.create_training_client_from_state_with_optimizer(path))
    close(scored(resumed), scored(whole))


@step()
def save_for_sampler(run: Run) -> None:
    expected = scored(run.training)
    assert run.saved_sampler == f"tinker://{run.run_id}/sampler_weights/{run.name}"
    sampler = done(run.service.create_sampling_client(model_path=run.saved_sampler))
    found = done(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)))
    assert found[0] is None
    close(found[1:], expected)


@step()
def sample_seeded(run: Run) -> None:
    first, again = sample(run.sampler, count=3), sample(run.sampler, count=3)
    assert len(first.sequences) == 3
    assert [one.tokens for one in first.sequences] == [one.tokens for one in again.sequences]
    assert all(len(one.logprobs) == len(one.tokens) <= 6 for one in first.sequences)
    greedy = sample(run.sampler, temperature=0.0, seed=None).sequences[0].tokens
    stopped = sample(run.sampler, temperature=0.0, stop=[greedy[1]]).sequences[0]
    assert stopped.stop_reason == "stop"
    assert len(stopped.tokens) <= 2


@step()
def sample_base_model(run: Run) -> None:
    sampler = done(run.service.create_sampling_client(base_model=run.model))
    assert sample(sampler, stop=[], max_tokens=3).sequences[0].stop_reason == "length"


@step()
def prompt_logprobs(run: Run) -> None:
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    answer = sample(run.sampler, options=options)
    assert answer.prompt_logprobs[0] is None
    close(answer.prompt_logprobs[1:], scored(run.training)[:3])
    assert answer.topk_prompt_logprobs[0] is None
    assert all(len(row) == 2 for row in answer.topk_prompt_logprobs[1:])


@step(since="0.33")
def scores(run: Run) -> None:
    options = {"topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2}
    answer = sample(run.sampler, options=options, stop=[])
    assert len(answer.sequences[0].topk_logprobs) == 6
    assert answer.prompt_alt_tokens is not None
    last = done(run.sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS), prompt_logprobs_last_n=2))
    assert last[:-2] == [None] * (len(TOKENS) - 2)
    close(last[-2:], scored(run.training)[-2:])


@step(since="0.12")
def pickled_sampler(run: Run) -> None:
    """As a worker process gets it: its seq_ids go into the billions."""
    clone = pickle.loads(pickle.dumps(run.sampler))
    assert sample(clone).sequences[0].tokens == sample(run.sampler).sequences[0].tokens
