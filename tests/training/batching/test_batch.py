from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, PassItem
from skyrl_tinker.training.batching.batch import MicroBatch, build_batch, micro_batches
from skyrl_tinker.training.batching.even_rows import SequenceCost
from tests.training.support.passes import make_data, make_item

FULL = ModelKey(4)


def _network(model: ModelKey) -> ModelKey | None:
    return model if model == FULL else None


def _cost(network: ModelKey | None, backward: bool) -> SequenceCost:
    return SequenceCost(100, 1)


@st.composite
def items(draw: st.DrawFn) -> list[PassItem]:
    shapes = st.lists(st.integers(1, 90), min_size=1, max_size=6)
    requests = draw(st.lists(st.tuples(st.integers(1, 4), shapes, st.booleans()), min_size=1, max_size=6))
    return [
        make_item(model, make_data(tuple(lengths), seed), backward=backward)
        for seed, (model, lengths, backward) in enumerate(requests)
    ]


@settings(max_examples=60)
@given(items=items(), world=st.integers(1, 4), budget=st.integers(1, 200), even=st.booleans())
def test_every_segment_runs_once_and_all_ranks_run_the_same_collectives(
    items: list[PassItem], world: int, budget: int, even: bool
) -> None:
    batch = build_batch(items)
    alive = frozenset(range(len(items)))
    plans = micro_batches(batch, alive, _network, world, budget, cost_of=_cost if even else None)
    segments = [s for plan in plans for micro in plan for s in micro.segments]
    assert sorted(segments) == list(range(len(batch.model)))
    collectives = [[(micro.network, micro.backward) for micro in plan] for plan in plans]
    assert all(found == collectives[0] for found in collectives)
    for micro in (micro for plan in plans for micro in plan):
        tokens = int(batch.lengths[list(micro.segments)].sum())
        assert tokens <= budget or len(micro.segments) == 1
        assert list(micro.segments) == sorted(micro.segments)
        for segment in micro.segments:
            info = batch.requests[batch.request[segment]]
            assert (micro.network, micro.backward) == (_network(info.model), info.backward)


def test_segments_lie_in_model_then_request_then_datum_order() -> None:
    batch = build_batch(
        [
            make_item(2, make_data((3, 2), 1), seq_id=2),
            make_item(1, make_data((4,), 2), seq_id=5),
            make_item(2, make_data((1,), 3), seq_id=1),
        ]
    )
    assert batch.model.tolist() == [1, 2, 2, 2]
    assert batch.request.tolist() == [1, 2, 0, 0]
    assert batch.datum.tolist() == [0, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 8, 10]


@settings(max_examples=60)
@given(items=items(), budget=st.integers(1, 200))
def test_the_cuts_of_a_request_do_not_depend_on_its_neighbours(items: list[PassItem], budget: int) -> None:
    """So that its gradients are the same sums with and without them."""

    def cuts(number: int, together: list[PassItem]) -> list[list[int]]:
        batch = build_batch(together)
        (plan,) = micro_batches(batch, frozenset(range(len(together))), _network, 1, budget)
        own = [[int(batch.datum[s]) for s in m.segments if batch.request[s] == number] for m in plan]
        return [cut for cut in own if cut]

    for number, item in enumerate(items):
        assert cuts(number, items) == cuts(0, [item])


def test_without_costs_rows_are_filled_in_the_order_of_the_batch() -> None:
    items = [make_item(1, make_data((30, 30, 30), 1)), make_item(2, make_data((40, 30, 20), 2))]
    batch, alive = build_batch(items), frozenset({0, 1})

    def rows(world: int, **costs: Any) -> list[list[tuple[int, ...]]]:
        plans = micro_batches(batch, alive, _network, world, 90, **costs)
        return [[micro.segments for micro in plan] for plan in plans]

    assert rows(1) == [[(0, 1, 2), (3, 4, 5)]]
    assert rows(2) == [[(0, 1, 2)], [(3, 4, 5)]]
    assert rows(1, cost_of=_cost) == [[(0, 3, 5), (1, 2, 4)]]
    assert rows(2, cost_of=_cost) == [[(2, 3, 5)], [(0, 1, 4)]]


def test_without_costs_a_segment_goes_to_the_rank_in_whose_share_its_middle_lies() -> None:
    batch = build_batch([make_item(1, make_data((20, 70, 10), 1))])
    plans = micro_batches(batch, frozenset({0}), _network, 2, 90)
    assert [[micro.segments for micro in plan] for plan in plans] == [[(0,)], [(1, 2)]]


def test_without_backward_passes_all_requests_of_a_network_share_rows_and_costs() -> None:
    batch = build_batch([make_item(1, make_data((5,), 1)), make_item(2, make_data((5,), 2), backward=False)])
    cost_of = Mock(wraps=_cost)

    def rows(**options: Any) -> list[MicroBatch]:
        (plan,) = micro_batches(batch, frozenset({0, 1}), _network, 1, 64, **options)
        return plan

    assert rows() == [MicroBatch(None, True, (0,)), MicroBatch(None, False, (1,))]
    assert rows(forward_only=True) == [MicroBatch(None, False, (0, 1))]
    assert rows(forward_only=True, cost_of=cost_of) == [MicroBatch(None, False, (0, 1))]
    assert [call.args[1] for call in cost_of.call_args_list] == [False]


def test_requests_left_out_are_not_run() -> None:
    batch = build_batch([make_item(1, make_data((5,), 1)), make_item(2, make_data((5,), 2))])
    (plan,) = micro_batches(batch, frozenset({1}), _network, 1, 64)
    assert [micro.segments for micro in plan] == [(1,)]
    assert micro_batches(batch, frozenset(), _network, 2, 64) == [[], []]
    (plan,) = micro_batches(batch, frozenset({1}), _network, 1, 64, cost_of=_cost)
    assert [micro.segments for micro in plan] == [(1,)]


@pytest.mark.parametrize("sent", [{}, {"clip_low_threshold": 0.5}])
def test_config_defaults_are_filled_in(sent: dict[str, float]) -> None:
    batch = build_batch([make_item(1, make_data((5,), 1, "ppo"), "ppo", config=sent)])
    expected = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2} | sent
    assert batch.requests[0].loss_config == expected
    assert batch.inputs.keys() == {"advantages", "logprobs"}
    assert batch.inputs["advantages"].dtype == np.float32


def test_an_input_that_may_be_left_out_is_filled_in_where_it_was() -> None:
    (with_mask, without) = make_data((5, 4), 1, "gspo")
    mask = with_mask.inputs["sequence_ratio_mask"]
    bare = {name: array for name, array in without.inputs.items() if name != "sequence_ratio_mask"}
    data = (with_mask, Datum(without.tokens, without.target_tokens, bare))
    batch = build_batch([make_item(1, data, "gspo"), make_item(2, make_data((3,), 2))])
    assert batch.inputs["sequence_ratio_mask"].tolist() == [*mask.tolist(), 1, 1, 1, 1, 0, 0, 0]


def test_candidates_lie_position_by_position() -> None:
    data = (*make_data((3,), 1, candidates=2), *make_data((4,), 2))
    batch = build_batch([make_item(1, data)])
    assert batch.shapes == ((3, 2), (4,))
    assert batch.cu_cells.tolist() == [0, 6, 10]
    assert batch.targets[:6].tolist() == data[0].target_tokens.reshape(-1).tolist()
