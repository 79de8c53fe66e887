"""Introduction and tags of /docs."""

DESCRIPTION = """\
The Tinker API on your own hardware. The usual client is the `tinker` SDK, with `TINKER_BASE_URL` set to
this server; every call can be made by hand, too.

**Keys.** A server on the loopback interface may run without API keys and then needs none. A server with
keys (`skyrl-tinker keys create`) expects one in the header `X-API-Key`, or as `Authorization: Bearer …`:
press *Authorize*. You see the objects of your own key only; others are answered with 404.

**Futures.** A call that takes long is answered at once with a `request_id`. POST it to
`retrieve_future`, which waits up to 20 s and answers with the result, with 408 (still pending: ask again;
`queue_state_reason` says why), or with 200 and `{"error", "category"}` if the request
failed. A result can be fetched several times.

**Order.** The requests of one model carry `seq_id` 1, 2, 3, …; they may arrive in any order and run in
order of `seq_id`. A repeated request gets the future of the first one. An invalid request becomes a
failed future: its `seq_id` is used.

**Start** with `create_session`, then `create_model` (and `retrieve_future`), `forward_backward`,
`optim_step`, `save_weights_for_sampler`, `asample`. Keep the session alive with `session_heartbeat`.
"""
TAGS = (
    {"name": "client", "description": "Calls that the SDK makes when it starts"},
    {"name": "auth", "description": "API keys and the JWTs that they are exchanged for"},
    {"name": "sessions", "description": "Sessions, to which everything that a client creates belongs"},
    {"name": "models", "description": "Models: creation, loading, description, release"},
    {"name": "training", "description": "Passes and optimizer steps"},
    {"name": "losses", "description": "Custom losses"},
    {"name": "weights", "description": "Saving weights"},
    {"name": "sampling", "description": "Sampling sessions and samples"},
    {"name": "futures", "description": "Futures: results and cancellation"},
    {"name": "runs", "description": "Training runs: the models that you created"},
    {"name": "checkpoints", "description": "Checkpoints: lists, publication, copies, deletion"},
    {"name": "downloads", "description": "Files by signed URLs, which need no API key"},
    {"name": "audit", "description": "Audit log"},
    {"name": "billing", "description": "Usage, without prices"},
    {"name": "console", "description": "Facts for the dashboard and `skyrl-tinker status`"},
    {"name": "openai", "description": "API for OpenAI's clients; base URL `/oai/api/v1`"},
    {"name": "health", "description": "Health and metrics, for the server's operator"},
)
