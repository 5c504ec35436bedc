"""Layers over a sequence segment by segment: forward keeps the states between segments, backward runs each again.

Of a segment nothing outlives its turn: input, gates, output and whatever the loss makes of it exist for one segment.
The backward pass takes the segments from the last to the first, computes each again from the states before it, recorded
by autograd, and differentiates it at once. (Chen et al. 2016, "Training deep nets with sublinear memory cost".)
"""

from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusedrnn.backends import Choice
from fusedrnn.backends.zoneout import seeds_from
from fusedrnn.cells import CellSpec, States, Weights, state_dtype
from fusedrnn.functional import Options, initial_states, run_layers
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading import OffloadHooks
from fusedrnn.offloading.resident import ResidentStack
from fusedrnn.replay import Surroundings, as_leaf, gradients, now, reached, require_unchanged, unhooked
from fusedrnn.streaming.results import Records, Result, append_shared
from fusedrnn.streaming.sources import Source
from fusedrnn.streaming.transfer import Departures, arrivals

OUTPUTS = ("sequence", "last", "host")
ChunkLoss = Callable[[Tensor, slice], Tensor]

_SEGMENT_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
"""Bytes of gates and cells of one segment: on the CPU they stay near the cache, on a GPU launches must pay."""
_LEAST_STEPS = 32


@dataclass(frozen=True)
class Streamed:
    """What is computed over the segments.

    Args:
        cell: What each layer computes.
        layers: Weights, layer by layer, of one direction.
        options: How to run.
        dropout: Probability of dropout between layers; 0 when evaluating.
        seeds: int64 [layers], from which zoneout is drawn for the whole sequence; None where none is drawn.
        resets: bool [T, B], true where the states start anew before a step, or None.
        output: What becomes of the output: one of `OUTPUTS`.
        loss: Takes the output of a segment, in the user's layout, and the timesteps it is of; None without.
        arrange: Turns an output [n, B, P] into the user's layout.
    """

    cell: CellSpec
    layers: Sequence[Weights]
    options: Options
    dropout: float
    seeds: Tensor | None
    resets: Tensor | None
    output: str
    loss: ChunkLoss | None
    arrange: Callable[[Tensor], Tensor]

    @property
    def flat(self) -> list[Tensor]:
        """The weights that are there."""
        return [weight for weights in self.layers for weight in weights if weight is not None]

    def with_weights(self, flat: Sequence[Tensor]) -> "Streamed":
        """Return the same for other weights."""
        items = iter(flat)
        layers = [
            Weights(*(None if weight is None else next(items) for weight in weights))  # type: ignore[arg-type]
            for weights in self.layers
        ]
        return replace(self, layers=layers)

    def run(self, x: Tensor, states: States, at: slice, sums: dict[int, Tensor]) -> tuple[Tensor, States, Any]:
        """Run the layers over one segment x [n, B, I]; `sums` as in `run_layers`."""
        seeds = self.seeds
        if seeds is not None:
            seeds = seeds_from(seeds, at.start * x.shape[1], self.layers[0].output_size)
        (y,), after, choice = run_layers(
            self.cell,
            x,
            states,
            self.layers,
            SequenceLayout(x.shape[0], x.shape[1]),
            self.options,
            dropout=self.dropout,
            resets=None if self.resets is None else self.resets[at],
            training=seeds is not None,
            seeds=seeds,
            sums=sums,
        )
        return y, after, choice

    def loss_of(self, y: Tensor, at: slice) -> Tensor:
        """Return the loss of one segment."""
        assert self.loss is not None
        value = self.loss(self.arrange(y), at)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"`chunk_loss` must return a tensor with one number, got {got}: sum or average it")
        return value.reshape(())


class _Cuts(Sequence[slice]):
    """The timesteps of segments, one after another, in eight bytes each."""

    def __init__(self) -> None:
        self._stops = array("q", [0])

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        return slice(self._stops[number], self._stops[number + 1])

    def append(self, steps: int) -> slice:
        """Add a segment of so many timesteps, and return which they are."""
        self._stops.append(self._stops[-1] + steps)
        return slice(*self._stops[-2:])


@dataclass
class _Sums:
    """The gradients summed so far, while segments are run backwards.

    Args:
        x: That of the input, shaped as it, None where it needs none.
        states: Of the states before the segment that was run last.
        weights: Sums in `state_dtype`, None where not needed.
        leaves: Of the leaves of the loss.
    """

    x: Tensor | None
    states: list[Tensor | None]
    weights: list[Tensor | None]
    leaves: list[Tensor | None]


@dataclass
class _Pass:
    """A forward pass, and what its backward pass needs."""

    streamed: Streamed
    source: Source
    stack: Any
    device: torch.device
    recorded: bool
    records: Records
    initial: States = ()
    cuts: _Cuts = field(default_factory=_Cuts)
    surroundings: list[Surroundings] = field(default_factory=list)
    leaves: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, start: Callable[[Tensor], States | None]) -> tuple[Tensor, States, Choice]:
        """Run all segments; return the result, the final states, and who ran the last segment."""
        streamed, choice = self.streamed, None
        states: States = ()
        result = Result(streamed.output, self.source.steps, self.device)
        pieces = arrivals(self.source.reads(), self.device, self.source.is_on(self.device))
        with torch.no_grad(), unhooked():
            with closing(pieces), closing(result):
                for x in pieces:
                    at = self.cuts.append(len(x))
                    if choice is None:
                        with torch.set_grad_enabled(self.recorded):
                            states = self.initial = initial_states(
                                streamed.cell, streamed.flat[0], start(x), streamed.layers, x.shape[1]
                            )
                    if self.recorded:
                        self._remember(x, states)
                    y, states, choice = streamed.run(x, states, at, {})
                    if streamed.loss is None:
                        result.put(at, y)
                    else:
                        result.add(self._loss(y, at))
            self.records.close()
            # The casts that autocast remembers from here have no history, so the caller must not get them.
            torch.clear_autocast_cache()
        if choice is None:
            raise ValueError("`input` must yield at least one chunk, got none")
        return result.value(), states, choice

    def _remember(self, x: Tensor, states: States) -> None:
        append_shared(self.surroundings, Surroundings(x))
        self.records.add([*states] if self.source.again else [*states, x])

    def _loss(self, y: Tensor, at: slice) -> Tensor:
        """Return the loss of a segment; note the leaves that it takes besides the output."""
        if not self.recorded:
            return self.streamed.loss_of(y, at)
        # Casts that autocast remembers from elsewhere would count as history.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            start = now()
            value = self.streamed.loss_of(y, at)
            leaves, history = reached([value], start)
        if history:
            raise ValueError(
                "`chunk_loss` must compute from its arguments and from parameters, got a tensor that another "
                "computation recorded by autograd made: compute it inside `chunk_loss`, or detach it"
            )
        self.leaves.update(leaves)
        return value.detach()

    def backward(self, flat: list[Tensor], dresult: Tensor | None, sums: _Sums, keep: bool) -> None:
        """Run the segments again, from the last to the first, and add up the gradients of each."""
        xs = self._inputs_again()
        dys = self._output_gradients(dresult)
        departures = Departures(self.device)
        with closing(xs), closing(dys), closing(departures):
            for number, x, dy in zip(reversed(range(len(self.cuts))), xs, dys, strict=True):
                self._back(number, x, dy, flat, sums, departures)
                if not keep:
                    self.records.release(number)

    def _back(
        self,
        number: int,
        x: Tensor | None,
        dy: Tensor | None,
        flat: list[Tensor],
        sums: _Sums,
        departures: Departures,
    ) -> None:
        """Run one segment again and differentiate it."""
        at, n = self.cuts[number], len(sums.states)
        kept = self.records.get(number)
        x = as_leaf(kept[n] if x is None else x, sums.x is not None)
        before = [as_leaf(state) for state in kept[:n]]
        weights = [as_leaf(w, total is not None) for w, total in zip(flat, sums.weights, strict=True)]
        into = {id(w): total for w, total in zip(weights, sums.weights, strict=True) if total is not None}
        with self.surroundings[number].again():
            y, after, _ = self.streamed.with_weights(weights).run(x, tuple(before), at, into)
            out = self._out(y, at)
        leaves = list(self.leaves.values())
        outputs, given = (*leaves, out, *after), (*sums.leaves, dy, *sums.states)
        dx, *found = gradients(outputs, given, [x, *before, *weights, *leaves])
        sums.states, sums.leaves = found[:n], found[n + len(weights) :]
        for total, gradient in zip(sums.weights, found[n:][: len(weights)], strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)
        if sums.x is not None:
            departures.put(self.source.rows(sums.x, at), torch.zeros_like(x) if dx is None else dx)

    def _out(self, y: Tensor, at: slice) -> Tensor:
        """Return what the gradient of the result is the gradient of."""
        if self.streamed.loss is not None:
            return self.streamed.loss_of(y, at)
        return y[-1] if self.streamed.output == "last" and len(y) else y

    def _inputs_again(self) -> Generator[Tensor | None]:
        if not self.source.again:
            return (None for _ in self.cuts)
        return arrivals(self.source.reads_again(self.cuts), self.device, self.source.is_on(self.device))

    def _output_gradients(self, dresult: Tensor | None) -> Generator[Tensor | None]:
        """Yield the gradient of each segment's part of the result, the last segment's first."""
        if dresult is None or self.streamed.loss is not None:
            return (dresult for _ in self.cuts)
        if self.streamed.output == "last":
            return (dresult if number == 0 else None for number in range(len(self.cuts)))
        reads = ((lambda at=at: dresult[at]) for at in reversed(self.cuts))
        return arrivals(reads, self.device, dresult.device == self.device)


class _Streamed(torch.autograd.Function):
    """Ties a pass that has been run to its inputs: the pass, its results, the input, then states, weights, leaves."""

    @staticmethod
    def forward(ctx: Any, run: _Pass, results: list[Tensor], n: int, x: Tensor | None, *tensors: Tensor) -> Any:
        counts = n, len(run.streamed.flat)
        ctx.save_for_backward(*tensors[: sum(counts)], *run.stack.take())
        # The pass holds no weights: autograd does, and the leaves are those that the loss holds.
        ctx.run, ctx.counts = replace(run, streamed=replace(run.streamed, layers=_without(run.streamed.layers))), counts
        ctx.versions = [(tensor, tensor._version) for tensor in (*run.leaves.values(), *([] if x is None else [x]))]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, dresult: Tensor | None, *dfinals: Tensor | None) -> Any:
        saved = list(ctx.saved_tensors)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a streamed sequence has first derivatives only, got a backward pass with `create_graph=True`: give "
                'the input whole, with output="sequence" and no `chunk_loss`'
            )
        require_unchanged(ctx.versions, "a streamed sequence")
        run: _Pass = ctx.run
        n, n_flat = ctx.counts
        flat = saved[n : n + n_flat]
        needs_x, needs = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        sums = _Sums(
            torch.empty_like(run.source.tensor) if needs_x and run.source.tensor is not None else None,
            list(dfinals),
            [
                torch.zeros_like(weight, dtype=state_dtype(weight.dtype)) if needed else None
                for weight, needed in zip(flat, needs[n : n + n_flat], strict=True)
            ],
            [None] * len(run.leaves),
        )
        run.stack.give(saved[n + n_flat :])
        try:
            run.backward(flat, dresult, sums, torch._C._autograd._get_current_graph_task_keep_graph())
        finally:
            run.stack.take()
        dweights = [
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums.weights, flat, strict=True)
        ]
        return None, None, None, sums.x, *sums.states, *dweights, *sums.leaves


def _without(layers: Sequence[Weights]) -> list[Weights]:
    """Return layers that only say which weights there are."""
    mark = torch.empty(0)
    return [Weights(*(None if w is None else mark for w in weights)) for weights in layers]  # type: ignore[arg-type]


def stream(
    streamed: Streamed, source: Source, start: Callable[[Tensor], States | None], offload: OffloadHooks | None
) -> tuple[Tensor, States, Choice, int]:
    """Run layers over a source, segment by segment.

    Args:
        streamed: What is computed.
        source: The input.
        start: Returns the initial states, each [layers, B, width], or None for zeros; it is shown the first segment.
        offload: Who keeps the states between segments, and input that cannot be read again; None for autograd.

    Returns:
        The result (the output [T, B, P], its last row [B, P], or the loss), the final states, who ran it, and the
        number of segments that are kept for a backward pass.
    """
    flat = streamed.flat
    device = flat[0].device
    stack = ResidentStack(device) if offload is None else offload.stack(device)
    run = _Pass(streamed, source, stack, device, torch.is_grad_enabled(), Records(stack))
    result, finals, choice = run.forward(start)
    inputs = [source.tensor, *run.initial, *flat, *run.leaves.values()]
    if run.recorded and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        result, *after = _Streamed.apply(run, [result, *finals], len(run.initial), *inputs)
        finals = tuple(after)
    return result, tuple(final.to(finals[0].dtype) for final in finals), choice, len(run.surroundings)


def segment_steps(cell: CellSpec, options: Options, layers: Sequence[Weights], batch: int, x: torch.dtype) -> int:
    """Return how many timesteps a segment has: a chunk, where the user says how long that is, else by bytes."""
    if isinstance(options.chunk, int):
        return options.chunk
    H, device = layers[0].hidden_size, layers[0].weight_ih.device.type
    step = len(layers) * max(1, batch) * H * cell.saved_bytes(cell.modes[0], x)
    steps = max(_LEAST_STEPS, _SEGMENT_BYTES.get(device, _SEGMENT_BYTES["cuda"]) // step)
    return 1 << (steps.bit_length() - 1)
