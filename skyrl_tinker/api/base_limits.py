"""Limits of requests by the base model of their model, sampling session or weights."""

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ModelId, ModelState, OwnerId, SamplingSessionId
from skyrl_tinker.domain.values import BaseModelFacts, Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.validation.limits import Limits
from skyrl_tinker.store import model_records, sampling_sessions
from skyrl_tinker.store.reports import openai_models
from skyrl_tinker.store.store import Store

MOST_KNOWN = 4096


class BaseLimits:
    """Limits by base model. That of a model, sampling session or path never changes, and is read once.

    The MOST_KNOWN that were asked for last are kept. One that the store does not know has the limits of the
    first base model: the store refuses the request.
    """

    def __init__(self, settings: Settings, store: Store, bases: Bases) -> None:
        self.bases = bases
        self._store = store
        self._limits = {facts.name: _limits(settings.for_base(facts.name), facts) for facts in bases.all}
        self._known: dict[str, Limits] = {}

    def of(self, facts: BaseModelFacts) -> Limits:
        return self._limits[facts.name]

    async def of_model(self, model_id: ModelId) -> Limits | Failure:
        """Return the limits of a model, or why it is parked, if its base model is not trained here."""
        if (limits := self._known.get(model_id)) is None:
            row = await self._store.read(lambda conn: model_records.by_id(conn, model_id))
            facts = None if row is None else self.bases.find(row.base_model)
            trained = facts is not None and facts.trainable
            if row is not None and not trained and row.state is ModelState.PARKED:
                return Failure(row.state_reason or "", "server")
            if facts is None:
                return self.of(self.bases.first)
            limits = self.of(facts)
        return self._keep(model_id, limits)

    async def of_sampling_session(self, session: SamplingSessionId, owner: OwnerId | None) -> Limits:
        """Return the limits of an owner's sampling session. UserError: its base model is not sampled here."""
        if (limits := self._known.get(session)) is None:
            row = await self._store.read(lambda conn: sampling_sessions.find(conn, owner, session))
            if row is None:
                return self.of(self.bases.first)
            if (facts := self.bases.find(row.base_model)) is None:
                raise UserError(
                    f"{session} is of base model {row.base_model!r}, expected {self.bases.sampled}"
                )
            limits = self.of(self.bases.require_sampleable(facts))
        return self._keep(session, limits)

    async def of_openai_model(self, model: str, owner: OwnerId | None) -> Limits:
        """Return the limits of a base model's name, or of a path.

        Raises as `openai_models.find_weights`, and UserError for a base model that is not sampled here.
        """
        facts = self.bases.find(model)
        if facts is not None or len(self.bases.all) == 1:  # the engine refuses names that are not known
            return self.of(self.bases.require_sampleable(facts or self.bases.first))
        if (limits := self._known.get(model)) is None:
            row, _ = await self._store.read(
                lambda conn: openai_models.find_weights(conn, owner, model, self.bases)
            )
            limits = self.of(self.bases.require_sampled(row.base_model))
        return self._keep(model, limits)

    def _keep(self, row_id: str, limits: Limits) -> Limits:
        self._known.pop(row_id, None)
        self._known[row_id] = limits
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return limits


def _limits(settings: Settings, facts: BaseModelFacts) -> Limits:
    return Limits(
        base_model=facts.name,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        max_lora_rank=settings.max_lora_rank,
        sampler=facts.sampler,
    )
