"""What a newcomer reads first at /docs."""

DESCRIPTION = """\
The Tinker API on your own hardware. Its usual client is the `tinker` SDK, with `TINKER_BASE_URL` set to
this server; everything it does can be done by hand, too.

**Keys.** A server on the loopback takes requests without a key. One with keys (`skyrl-tinker keys
create`) wants it in the header `X-API-Key`, or as `Authorization: Bearer …`: press *Authorize*. You see
only what your own key made; anything else is answered with 404, as if it did not exist.

**Promises.** Calls that take long answer at once with a `request_id`. POST it to `retrieve_future`: that
waits up to 20 s, then answers with the result, with 408 (not there yet: ask again; `queue_state_reason`
says what it waits for), or with 200 and `{"error", "category"}` when the request failed. Results can be
fetched several times.

**Order.** The requests of one model carry `seq_id` 1, 2, 3, …; they may arrive in any order and run in
this one. One that comes again is answered with its first promise. A wrong request is a failed promise:
its number is used.

**Begin** with `create_session`, then `create_model` (and `retrieve_future`), `forward_backward`,
`optim_step`, `save_weights_for_sampler`, `asample`. Keep the session alive with `session_heartbeat`.
"""
TAGS = (
    {"name": "client", "description": "What the SDK asks when it starts"},
    {"name": "auth", "description": "Keys and the JWTs they are traded for"},
    {"name": "sessions", "description": "Everything a client makes belongs to a session"},
    {"name": "models", "description": "Models: made, loaded, described, released"},
    {"name": "training", "description": "Passes and optimizer steps"},
    {"name": "losses", "description": "Losses of one's own"},
    {"name": "weights", "description": "Saves"},
    {"name": "sampling", "description": "Sampling sessions and samples"},
    {"name": "futures", "description": "Promises: waited for and given up"},
    {"name": "runs", "description": "Training runs: the models you made"},
    {"name": "checkpoints", "description": "Checkpoints: listed, published, copied, deleted"},
    {"name": "downloads", "description": "Files by signed URLs, which need no key"},
    {"name": "audit", "description": "What was done"},
    {"name": "billing", "description": "What was used; nothing has a price"},
    {"name": "openai", "description": "The API of OpenAI's clients; base URL `/oai/api/v1`"},
    {"name": "health", "description": "For whoever operates the server"},
)
