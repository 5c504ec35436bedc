import random

import pytest
import torch

from fusedrnn.layout import SequenceLayout, dense_steps


def random_layout(seed: int) -> SequenceLayout:
    rng = random.Random(seed)
    steps, batch = rng.randint(1, 12), rng.randint(1, 5)
    if rng.random() < 0.4:
        return SequenceLayout(steps, batch)
    lengths = [steps, *(rng.randint(1, steps) for _ in range(batch - 1))]
    return SequenceLayout(steps, batch, tuple(sum(length > t for length in lengths) for t in range(steps)))


def rows_of(layout: SequenceLayout) -> list[tuple[int, int]]:
    """(step, row of the batch) of every row, written out."""
    sizes = layout.batch_sizes or (layout.batch,) * layout.steps
    return [(t, b) for t, size in enumerate(sizes) for b in range(size)]


@pytest.mark.parametrize("seed", range(200))
def test_links_and_finals_follow_every_row_of_every_sequence(seed):
    layout, rng = random_layout(seed), random.Random(seed)
    reverse, length = rng.random() < 0.5, rng.randint(1, 5)
    places = rows_of(layout)
    state = dict.fromkeys(range(layout.batch), "initial")
    seen = []
    for chunk in layout.chunks(length, reverse, halve_tail=rng.random() < 0.5):
        seen.append((chunk.first, chunk.last))
        assert [t for t, _ in places[chunk.start : chunk.stop]] == [
            t for t in range(chunk.first, chunk.last) for _ in range((layout.batch_sizes or [layout.batch] * 99)[t])
        ]
        follows = {}
        for start, stop, source, from_state in chunk.steps.links:
            for offset in range(stop - start):
                row = chunk.start + start + offset
                assert row not in follows
                follows[row] = state[source + offset] if from_state else places[chunk.start + source + offset]
        assert sorted(follows) == list(range(chunk.start, chunk.stop))
        for row, before in follows.items():
            t, b = places[row]
            neighbour = (t + 1 if reverse else t - 1, b)
            assert before == (neighbour if neighbour in places else "initial")
        for start, stop, row in chunk.steps.finals:
            for b in range(start, stop):
                state[b] = places[chunk.start + row + b - start]
    assert sorted(seen) == [(a, b) for a, b in sorted(seen)] and sum(b - a for a, b in seen) == layout.steps
    lengths = [sum(b == other for _, other in places) for b in range(layout.batch)]
    assert state == {b: (0 if reverse else lengths[b] - 1, b) for b in range(layout.batch)}


def test_dense_chunks_have_two_links_and_share_their_steps():
    chunks = SequenceLayout(100, 3).chunks(25)
    assert len({id(chunk.steps) for chunk in chunks}) == 1
    assert [tuple(link) for link in chunks[0].steps.links] == [(0, 3, 0, True), (3, 75, 0, False)]
    assert [tuple(link) for link in dense_steps(25, 3, True).links] == [(72, 75, 0, True), (0, 72, 3, False)]
    assert dense_steps(25, 3, True).row_step == -3


def test_tails_use_powers_of_two_so_that_chunk_lengths_are_few():
    lengths = {
        chunk.last - chunk.first for T in range(1, 400) for chunk in SequenceLayout(T, 2).chunks(64, halve_tail=True)
    }
    assert lengths == {1, 2, 4, 8, 16, 32, 64}


def test_take_copies_only_where_strides_demand_it():
    layout = SequenceLayout(6, 2)
    chunk = layout.chunks(2)[1]
    x = torch.arange(36.0).view(6, 2, 3)
    rows = layout.take(x, chunk)
    assert rows.data_ptr() == x[2].data_ptr()
    assert torch.equal(rows, x[2:4].reshape(4, 3))
    batch_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(layout.take(batch_first, chunk), rows)
    assert torch.equal(layout.take(torch.ones(1).expand(6, 2, 3), chunk), torch.ones(4, 3))
