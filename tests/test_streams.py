"""Random streams: the numbers a component draws depend on seed, component and index alone."""

import gc
import random
import sys
import weakref

import numpy as np
import torch

from fdg.runtime import streams
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


def test_a_spare_normal_stays_with_its_stream():
    """Normals come in pairs; who draws one finds the other at the next call, whatever others drew in between."""

    def normals():
        return np.random.randn(), random.gauss(0, 1), torch.randn(1, dtype=torch.float64).item()

    with Streams(2).of("actor"):
        expected = normals(), normals()
    streams = Streams(2)
    with streams.of("actor"):
        first = normals()
    saved = streams.state()
    with streams.of("learner"):
        normals()
    outer = normals()
    with streams.of("actor"):
        assert (first, normals()) == expected
    restored = Streams(0)
    restored.load_state(saved)
    with restored.of("actor"):
        assert normals() == expected[1]
    assert normals() != outer


def test_a_generator_that_user_code_sets_belongs_to_the_stream():
    outer, streams = np.random.get_bit_generator(), Streams(2)
    with streams.of("actor"):
        np.random.set_bit_generator(np.random.PCG64(1))
        first = np.random.rand()
    assert np.random.get_bit_generator() is outer
    expected = np.random.RandomState(np.random.PCG64(1)).random(2).tolist()
    with streams.of("actor"):
        assert [first, np.random.rand()] == expected


def test_streams_keep_and_free_their_numpy_generators():
    class Generator(np.random.MT19937):
        """One that can be watched."""

    outer = np.random.get_bit_generator()
    before, streams = sys.getrefcount(outer), Streams(2)
    with streams.of("actor"):
        np.random.set_bit_generator(Generator(1))
        generator = weakref.ref(np.random.get_bit_generator())
    gc.collect()
    assert generator() is not None
    del streams
    gc.collect()
    assert generator() is None
    assert sys.getrefcount(outer) == before


def test_the_quick_way_and_the_public_functions_give_the_same_numbers():
    """The layouts in memory are known for the versions that are tested, so the quick way is there."""
    assert streams.Stream is streams.QuickStream

    def numbers(kind):
        made = [kind(index) for index in range(2)]
        drawn = []
        for index in (0, 1, 0):
            with made[index]:
                drawn.append(draw())
            drawn.append(draw())
        return drawn

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    quick = numbers(streams.QuickStream)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert numbers(streams.PlainStream) == quick
