"""The order in which PyTorch's hash table walks its keys, as it was seen on torch_npu 2.13.0."""

import random

import pytest

from hbmtwin.allocators.caching.events import stream_key
from hbmtwin.allocators.caching.hash_order import HashOrder

STREAMS = {stream_key("torch_npu", stream): stream for stream in range(33)}


def table(*streams: int) -> HashOrder:
    order = HashOrder()
    for stream in streams:
        order.add(stream_key("torch_npu", stream))
    return order


def walked(order: HashOrder) -> list[int]:
    return [STREAMS[key] for key in order]


@pytest.mark.parametrize(
    ("added", "order"),
    [
        ([0, 1], [0, 1]),
        ([0, 1, 2], [2, 0, 1]),
        ([0, 1, 2, 3], [3, 2, 0, 1]),
        ([0, 1, 2, 3, 4], [3, 2, 0, 4, 1]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [6, 3, 5, 2, 0, 7, 4, 1]),
    ],
)
def test_the_observed_orders(added: list[int], order: list[int]) -> None:
    assert walked(table(*added)) == order


def test_streams_that_want_the_same_slot_stand_in_order_of_arrival() -> None:
    assert walked(table(0, 2)) == [0, 2]
    assert walked(table(2, 0)) == [2, 0]


def test_a_table_that_has_grown_stays_grown() -> None:
    order = table(0, 1, 2)
    for stream in (0, 1, 2):
        order.discard(stream_key("torch_npu", stream))
    assert len(order) == 0
    order.add(stream_key("torch_npu", 0))
    order.add(stream_key("torch_npu", 2))
    assert walked(order) == [2, 0]


def test_a_walk_removes_and_looks_at_the_same_slot_again() -> None:
    order = table(0, 1, 2, 3, 4, 5, 6, 7)
    seen = []

    def keep(key: int) -> bool:
        seen.append(STREAMS[key])
        return STREAMS[key] % 2 == 1

    order.walk(keep)
    assert seen == [6, 3, 5, 2, 0, 7, 4, 1]
    assert sorted(walked(order)) == [1, 3, 5, 7]


def test_the_33rd_stream_is_the_first_again() -> None:
    assert stream_key("torch_npu", 33) == stream_key("torch_npu", 1)
    assert stream_key("torch_npu", 32) != stream_key("torch_npu", 0)
    assert stream_key("torch_npu", 1) == 20 << 56 | 96


def test_it_is_a_set_whatever_is_added_and_removed() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        order, model = HashOrder(), set()
        for _ in range(150):
            key = stream_key("torch_npu", chance.randrange(33))
            if chance.random() < 0.55:
                order.add(key)
                model.add(key)
            else:
                order.discard(key)
                model.discard(key)
            assert sorted(order) == sorted(model)
            assert len(order) == len(model)
            assert all((key in order) == (key in model) for key in STREAMS)
