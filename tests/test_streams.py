"""Random streams: the numbers a component draws depend on seed, component and index alone."""

import random

import numpy as np
import torch

from fdg.runtime.streams import Streams


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn()


def test_interleaving_does_not_change_a_stream():
    alone = Streams(3)
    with alone.of("actor", 1):
        first = draw()
    with alone.of("actor", 1):
        second = draw()
    mixed = Streams(3)
    for _ in range(2):
        with mixed.of("learner"):
            draw()
    with mixed.of("actor", 1):
        assert draw() == first
    with mixed.of("env", 0):
        draw()
    with mixed.of("actor", 1):
        assert draw() == second


def test_streams_differ_by_seed_component_and_index():
    drawn = set()
    for seed, component, index in [(1, "actor", 0), (1, "actor", 1), (1, "env", 0), (2, "actor", 0)]:
        with Streams(seed).of(component, index):
            drawn.add(str(draw()))
    assert len(drawn) == 4


def test_outer_generators_are_left_as_they_were():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with Streams(1).of("actor"):
        draw()
    assert draw() == expected


def test_state_round_trip():
    streams = Streams(9)
    with streams.of("buffer"):
        draw()
    saved = streams.state()
    with streams.of("buffer"):
        expected = draw()
    other = Streams(0)
    other.load_state(saved)
    with other.of("buffer"):
        assert draw() == expected


def test_direct_state_access_agrees_with_the_public_functions():
    from fdg.runtime.streams import _python_state

    saved = random.getstate()
    raw = _python_state.get()
    random.random()
    _python_state.set(raw)
    assert random.getstate() == saved


def test_the_quick_way_and_the_public_functions_give_the_same_numbers(monkeypatch):
    from fdg.runtime import streams

    def numbers():
        made = Streams(4)
        drawn = []
        for index in (0, 1, 0):
            with made.of("actor", index):
                drawn.append(draw())
        return drawn

    quick = numbers()
    monkeypatch.setattr(streams, "_get_torch", torch.default_generator.get_state)
    monkeypatch.setattr(streams, "_set_torch", torch.default_generator.set_state)
    monkeypatch.setattr(streams, "_get_python", random.getstate)
    monkeypatch.setattr(streams, "_set_python", random.setstate)
    assert numbers() == quick
