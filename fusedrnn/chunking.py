"""What is to be computed, in which pieces, and where they wait for the backward pass."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedrnn.backends.base import Backend, ChunkedBackend, Task, Variant
from fusedrnn.backends.rows import aligned
from fusedrnn.cells import CellSpec, States, Weights
from fusedrnn.layout import Chunk, SequenceLayout


class Handle(Protocol):
    """A pushed buffer: `get` it before use, `release` it after; dropping it releases it too."""

    def get(self, writable: bool = False) -> Tensor:
        """Return the buffer, ready to be read on the current stream, and to be overwritten if `writable`."""

    def release(self) -> None:
        """Give the buffer back."""


class Slot(Protocol):
    """A reserved buffer that has not been pushed yet."""

    buffer: Tensor


class Stack(Protocol):
    """Where the buffers of chunks wait for the backward pass."""

    def reserve(self, nbytes: int) -> Slot:
        """Return a slot whose `buffer` is a uint8 tensor [nbytes] that may be written on the current stream."""

    def push(self, slot: Any) -> Handle:
        """Take a slot whose content is final."""

    def take(self) -> list[Tensor]:
        """Hand over the tensors that autograd shall keep until the backward pass; none where the stack keeps them."""

    def give(self, buffers: list[Tensor]) -> None:
        """Put those tensors back at the start of the backward pass."""


@dataclass(frozen=True)
class Plan:
    """What to compute, who does it, in which pieces, and where they wait for the backward pass.

    Args:
        tasks: What to compute: one task per direction, alike but for their weights. Each has its columns of the output
            and its part of the states.
        backend: Who computes it.
        chunk: Timesteps per chunk.
        stack: Takes the chunks' buffers; None where nothing is saved.
        sums: For each of `weights`, a sum of gradients that is to be added to, of which then none is returned, or None.
        older: How many chunks, the first to be computed, are saved in another mode than the tasks', and in which.
    """

    tasks: tuple[Task, ...]
    backend: Backend
    chunk: int
    stack: Stack | None = None
    sums: tuple[Tensor | None, ...] | None = None
    older: tuple[int, str] = (0, "hidden")

    @property
    def layout(self) -> SequenceLayout:
        """Where the rows lie."""
        return self.tasks[0].layout

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are there."""
        return [weight for task in self.tasks for layer in task.layers for weight in layer if weight is not None]

    @property
    def saves(self) -> set[str]:
        """The save modes of the chunks."""
        return {self.tasks[0].save, self.older[1]} if self.older[0] else {self.tasks[0].save}

    def chunks(self) -> Iterator[tuple[int, Task, Chunk]]:
        """Yield the chunks in processing order, each with the number of its task, and the task in the chunk's mode."""
        left, save = self.older
        for index, task in enumerate(self.tasks):
            other = replace(task, save=save) if left > 0 else task
            for chunk in task.layout.chunks(self.chunk, task.reverse, halve_tail=True):
                yield index, other if left > 0 else task, chunk
                left -= 1

    def with_layers(self, layers: list[Weights]) -> "Plan":
        """Return the plan for other weights; for none, one that keeps no weights alive."""
        depth = len(layers) // len(self.tasks)
        parts = [tuple(layers[k * depth : (k + 1) * depth]) for k in range(len(self.tasks))]
        return replace(self, tasks=tuple(replace(t, layers=part) for t, part in zip(self.tasks, parts, strict=True)))

    def states(self, index: int, states: States) -> States:
        """Return a task's part of the states, views."""
        return tuple(state.tensor_split(len(self.tasks))[index] for state in states)

    def columns(self, index: int, rows: Tensor) -> Tensor:
        """Return a task's columns of the output, or of its gradient, a view."""
        return rows.tensor_split(len(self.tasks), -1)[index]

    def slot_bytes(self, task: Task, rows: int, states: States) -> int:
        """Return the bytes of the slot of `rows` rows: the backend's part, then a task's states before the chunk."""
        # Not `nbytes`, which symbolic sizes do not have.
        before = sum(aligned(state.numel() * state.element_size()) for state in states)
        return self.own_bytes(task, rows, states) + before

    def own_bytes(self, task: Task, rows: int, states: States) -> int:
        """Return the bytes of a chunk's slot that are the backend's."""
        assert isinstance(self.backend, ChunkedBackend)
        return aligned(self.backend.slot_bytes(task, rows, states[0].dtype))

    def expected_bytes(self, states: States) -> int:
        """Return the bytes of all slots."""
        before = self.states(0, states)
        alike = Counter((task.save, chunk.rows) for _, task, chunk in self.chunks())
        tasks = {save: replace(self.tasks[0], save=save) for save in self.saves}
        return sum(n * self.slot_bytes(tasks[save], rows, before) for (save, rows), n in alike.items())

    def reads(self, weights_need_grad: bool) -> tuple[bool, ...]:
        """Return whether the backward pass reads x and the rows of each state that may be an output again."""
        assert isinstance(self.backend, ChunkedBackend)
        needs = [self.backend.needs(save, weights_need_grad) for save in self.saves]
        return tuple(map(any, zip(*needs, strict=True)))


def tasks(
    cell: CellSpec,
    parts: Sequence[tuple[Weights, ...]],
    reverses: Sequence[bool],
    layout: SequenceLayout,
    save: str,
    resets: Tensor | None,
    variant: Variant,
    seeds: Tensor | None,
) -> tuple[Task, ...]:
    """Return a task per direction.

    Args:
        cell: What each layer computes.
        parts: Weights of the layers, per direction.
        reverses: Per direction, whether time runs backwards.
        layout: Where the rows lie.
        save: One of the cell's modes.
        resets: bool [T, B], true where the states start anew before a step, or None.
        variant: How the recurrence departs from the cell's equations.
        seeds: int64 [directions * layers], from which zoneout is drawn, or None.
    """
    found = []
    drawn = [None] * len(parts) if seeds is None else seeds.tensor_split(len(parts))
    for layers, reverse, own_seeds in zip(parts, reverses, drawn, strict=True):
        own = resets
        if own is not None:
            if reverse:
                # Run backwards, a piece starts with its last step: the one before the next piece's first.
                own = torch.cat((own[1:], torch.zeros_like(own[:1])))
            own = own.reshape(-1, 1)
        found.append(Task(cell, layers, layout, reverse, save, own, variant, own_seeds))
    return tuple(found)
