"""Calling a cell step after step: chunks of time, nests of tensors, and rows that have ended.

Time is cut at the same borders however the states are saved: the gradients that meet at a border are then added in the
same order, and agree bit by bit.
"""

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedrnn import _checks

Run = Callable[..., tuple[list[list[Tensor]], list[Tensor]]]


class Chunk(NamedTuple):
    """Steps `first .. last` (`last` excluded); `masked` where some sequences have ended, else all of them go on."""

    first: int
    last: int
    masked: bool


def cut_time(full: int, steps: int) -> list[Chunk]:
    """Cut time into chunks of about sqrt(steps) steps, which balances states at borders against steps in a chunk.

    Args:
        full: Steps that every sequence has; no chunk reaches across their end.
        steps: Steps of the longest sequence.
    """
    length = isqrt(max(steps - 1, 0)) + 1
    return [
        Chunk(first, min(first + length, stop), masked)
        for start, stop, masked in ((0, full, False), (full, steps, True))
        for first in range(start, stop, length)
    ]


class Loop:
    """A cell over time, and what is the same at every step.

    At least one step is run, with all rows ended if need be: it tells the shape of the output and connects the results
    to what they would depend on.

    Args:
        step: `(input, state) -> (output, state)`.
        x_spec: Structure of the inputs.
        state_spec: Structure of the state.
        lengths: Steps of each sequence, or None where each has them all.
        T: Timesteps.
        B: Sequences.
        device: Where the inputs are.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        x_spec: pytree.TreeSpec,
        state_spec: pytree.TreeSpec,
        lengths: list[int] | None,
        T: int,
        B: int,
        device: torch.device,
    ) -> None:
        if lengths is None:
            lengths = [T] * B
        self.step, self.x_spec, self.state_spec = step, x_spec, state_spec
        self.T, self.B = T, B
        full = min(lengths, default=T)
        steps = max(1, max(lengths, default=T))
        self.chunks = cut_time(full, steps)
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device) if full < steps else None
        self.out_spec: pytree.TreeSpec | None = None

    def pieces(self, xs: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the inputs of each chunk, given those of all time, [T, B, ...] (one step of zeros for T = 0)."""
        xs = xs if self.T else [x.new_zeros(1, *x.shape[1:]) for x in xs]
        sizes = [chunk.last - chunk.first for chunk in self.chunks]
        sizes.append(max(self.T, 1) - sum(sizes))
        # One split, and in a chunk one unbind, not a slice per step: the gradient of each slice is as large as its
        # source.
        return list(zip(*(x.split(sizes)[:-1] for x in xs), strict=True))

    def run(self, chunk: Chunk, *tensors: Tensor) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Run the steps of a chunk.

        Args:
            chunk: Which steps.
            *tensors: Inputs of the chunk, each [steps, B, ...], then the state before it.

        Returns:
            For each tensor of the output its value at every step, as the cell gave it, and the state after the chunk.
        """
        xs, state = list(tensors[: self.x_spec.num_leaves]), list(tensors[self.x_spec.num_leaves :])
        masks: list[Sequence[Tensor]] = []
        if chunk.masked:
            ended = self._ended(chunk)
            xs = [x.masked_fill(_expand(ended, x.dim()), 0) for x in xs]
            masks = [_expand(ended, s.dim() + 1).unbind(0) for s in state]
        nest = self.state_spec.unflatten(state)
        outs = []
        for t, leaves in enumerate(zip(*(x.unbind(0) for x in xs), strict=True)):
            result = self.step(self.x_spec.unflatten(leaves), nest)
            if self.out_spec is None:
                self._check_first(result, state)
            out, nest = result
            if masks:
                new = self._leaves("states", self.state_spec, nest)
                state = [torch.where(mask[t], s, n) for mask, s, n in zip(masks, state, new, strict=True)]
                nest = self.state_spec.unflatten(state)
            outs.append(out)
        assert self.out_spec is not None
        columns = zip(*(self._leaves("outputs", self.out_spec, out) for out in outs), strict=True)
        # Each state has a node of its own, in which the gradients from the next chunk are added up before others join.
        state = [s.view_as(s) for s in self._leaves("states", self.state_spec, nest)]
        return [list(column) for column in columns], state

    def stack(self, chunk: Chunk, steps: list[Tensor]) -> Tensor:
        """Return a chunk's output [steps, B, ...], zero past each sequence's length."""
        y = torch.stack(steps)
        return y.masked_fill_(_expand(self._ended(chunk), y.dim()), 0) if chunk.masked else y

    def recorded(self, xs: list[Tensor], state: list[Tensor], run: Run | None = None) -> list[Tensor]:
        """Run all chunks for autograd to see.

        Args:
            xs: Inputs, each [T, B, ...].
            state: Initial state.
            run: Runs a chunk in place of the method of that name.

        Returns:
            Outputs, each [T, B, ...], then the final state.
        """
        columns: list[list[Tensor]] = []
        state = [s.view_as(s) for s in state]
        for chunk, piece in zip(self.chunks, self.pieces(xs), strict=True):
            steps, state = (run or self.run)(chunk, *piece, *state)
            columns = columns or [[] for _ in steps]
            for column, more in zip(columns, steps, strict=True):
                column.extend(more)
        whole = Chunk(0, max(self.T, 1), self.lengths is not None)
        rest = whole.last - self.chunks[-1].last
        outputs = [self.stack(whole, column + [torch.zeros_like(column[0])] * rest) for column in columns]
        return [*(y[: self.T] for y in outputs), *state]

    def unrecorded(
        self, xs: list[Tensor], state: list[Tensor], at_border: Callable[[list[Tensor]], None] = lambda state: None
    ) -> list[Tensor]:
        """Run all chunks without autograd, in less memory.

        Args:
            xs: Inputs, each [T, B, ...].
            state: Initial state.
            at_border: Called with the state before each chunk.

        Returns:
            Outputs, each [T, B, ...], then the final state.
        """
        outputs: list[Tensor] = []
        for chunk, piece in zip(self.chunks, self.pieces(xs), strict=True):
            at_border(state)
            columns, state = self.run(chunk, *piece, *state)
            outputs = outputs or [column[0].new_zeros(max(self.T, 1), *column[0].shape) for column in columns]
            for y, column in zip(outputs, columns, strict=True):
                y[chunk.first : chunk.last] = self.stack(chunk, column)
        return [*(y[: self.T] for y in outputs), *state]

    def _ended(self, chunk: Chunk) -> Tensor:
        """Return [steps, B], true past each sequence's length."""
        assert self.lengths is not None
        return torch.arange(chunk.first, chunk.last, device=self.lengths.device).unsqueeze(1) >= self.lengths

    def _leaves(self, word: str, spec: pytree.TreeSpec, nest: Any) -> list[Any]:
        """Return the tensors of a nest that the cell returned."""
        try:
            leaves = spec.flatten_up_to(nest)
        except ValueError:
            leaves = [None]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            expected = spec.unflatten([_Word("*")] * spec.num_leaves)
            got = pytree.tree_map(lambda leaf: _Word("*" if isinstance(leaf, Tensor) else type(leaf).__name__), nest)
            raise TypeError(f"`cell` must return {word} of one structure of tensors = {expected!r}, got {got!r}")
        return leaves

    def _check_first(self, result: Any, state: list[Tensor]) -> None:
        """Check what the first step returned, and note the structure of the output."""
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"`cell` must return a tuple (output, state), got {got}")
        for before, after in zip(state, self._leaves("states", self.state_spec, result[1]), strict=True):
            if after.shape != before.shape:
                raise ValueError(
                    f"`cell` must return a state of the shape of the one before = {tuple(before.shape)}, got "
                    f"{tuple(after.shape)}"
                )
            if after.dtype != before.dtype and not _checks.under_autocast(before):
                raise ValueError(
                    f"`cell` must return a state of the dtype of the one before = {before.dtype}, got {after.dtype}: "
                    "give `initial_state` in that dtype, or convert it in the cell"
                )
        leaves, spec = pytree.tree_flatten(result[0])
        for out in leaves:
            _checks.require_tensor("cell(input, state)[0]", out)
            if out.dim() == 0 or out.shape[0] != self.B:
                raise ValueError(f"`cell` must return outputs of shape (B = {self.B}, ...), got {tuple(out.shape)}")
        self.out_spec = spec


class _Word(str):
    """A string that is shown without quotes."""

    __repr__ = str.__str__


def _expand(mask: Tensor, dim: int) -> Tensor:
    """Return [steps, B] as [steps, B, 1, ...] of `dim` dimensions."""
    return mask.reshape(*mask.shape, *(1,) * (dim - 2))
