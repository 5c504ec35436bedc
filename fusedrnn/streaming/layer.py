"""What `fusedrnn.LSTM` and `fusedrnn.GRU` do with an input that is not to be whole on their device."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fusedrnn import _checks
from fusedrnn.backends.zoneout import draw_seeds
from fusedrnn.cells import States, Weights
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading import innermost
from fusedrnn.streaming.segments import OUTPUTS, ChunkLoss, Streamed, segment_steps, stream
from fusedrnn.streaming.sources import Source, source_of
from fusedrnn.streaming.transfer import arrivals

BACKWARDS = ("truncated", "full")


def run_streamed(
    layer: Any, input: Any, states: States | None, resets: Any, output: str, chunk_loss: ChunkLoss | None, cells: bool
) -> tuple[Tensor, States]:
    """Run a layer segment by segment; see `fusedrnn.LSTM.forward`.

    Args:
        layer: A `fusedrnn.LSTM` or `fusedrnn.GRU`.
        input: A tensor, an array, or an iterable of chunks.
        states: Initial states as given, or None.
        resets: As given.
        output: One of `OUTPUTS`.
        chunk_loss: As given.
        cells: Whether cell states are asked for, which a streamed sequence does not return.

    Returns:
        The result in the user's layout, and the final states.
    """
    _checks.require_choice("output", output, OUTPUTS)
    if chunk_loss is not None and not callable(chunk_loss):
        raise TypeError(f"`chunk_loss` must be a function of an output and its timesteps, got {chunk_loss!r}")
    if chunk_loss is not None and output != "sequence":
        raise ValueError(f"`chunk_loss` takes the output: leave `output` as it is, got output={output!r}")
    if cells:
        raise ValueError("`return_cells` must be False for a streamed sequence, got True: give the input whole")
    _require_streamable(layer, input)
    weights = layer._layers()
    source = _source(layer, input, weights, None)
    if resets is not None:
        if source.steps is None or source.batch is None:
            raise ValueError(
                "`resets` needs an input whose length is known, got an iterable of chunks: use `stream`, or give an "
                "array"
            )
        layout = SequenceLayout(source.steps, source.batch)
        resets = layer._check_resets(resets, weights[0].weight_ih, layout, packed=False, batched=not source.unbatched)
    streamed = Streamed(
        layer.cell,
        weights,
        # What a segment saves does not live long enough to be offloaded.
        replace(layer.options, offload=None),
        dropout=layer._drawn_dropout(),
        seeds=draw_seeds(len(weights), weights[0].weight_ih.device)
        if layer.training and layer.options.zoneout
        else None,
        resets=resets,
        output=output,
        loss=chunk_loss,
        arrange=lambda y: layer._arranged(y, not source.unbatched),
    )
    offload = innermost() or layer.options.offload
    result, finals, choice, segments = stream(
        streamed, source, lambda x: _states(layer, source, states, x), offload if torch.is_grad_enabled() else None
    )
    layer._choice = (
        f"backend {choice.backend.name!r}, save={choice.save!r} within a segment: the sequence was streamed"
        + (f" in {segments} segments, of which the states before each are kept" if segments else "")
    )
    if output == "last":
        result = result.squeeze(0) if source.unbatched else result
    elif chunk_loss is None:
        result = layer._arranged(result, not source.unbatched)
    return result, tuple(state.squeeze(1) for state in finals) if source.unbatched else finals


def stream_chunks(
    layer: Any, input: Any, hx: Any, steps: int | None, backward: str, resets: Any
) -> Iterator[tuple[Tensor, Any]]:
    """Return what `fusedrnn.LSTM.stream` yields; wrong arguments raise at once."""
    _checks.require_choice("backward", backward, BACKWARDS)
    if steps is not None and not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"`steps` must be a number of timesteps of at least 1, got {steps!r}")
    _require_streamable(layer, input)
    weights = layer._layers()
    source = _source(layer, input, weights, steps)
    if source.tensor is not None and source.tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "`input` must not need a gradient here: give it as `input.detach()`, or use the layer itself with "
            "`output` or `chunk_loss`, which return gradients of the input"
        )
    return _stream_chunks(layer, source, hx, backward, resets)


def _stream_chunks(layer: Any, source: Source, state: Any, backward: str, resets: Any) -> Iterator[tuple[Tensor, Any]]:
    device = next(iter(layer.parameters())).device
    stop = 0
    with closing(arrivals(source.reads(), device, source.is_on(device))) as pieces:
        for piece in pieces:
            at, stop = slice(stop, stop + len(piece)), stop + len(piece)
            x = layer._arranged(piece, not source.unbatched)
            here = (
                None if resets is None else resets[:, at] if layer.batch_first and not source.unbatched else resets[at]
            )
            y, state = layer(x, state, resets=here)
            yield y, state
            if backward == "truncated":
                state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()


def _require_streamable(layer: Any, input: Any) -> None:
    if layer.bidirectional:
        raise ValueError(
            "a streamed sequence must run in one direction, got `bidirectional=True`: the other direction would begin "
            "at the end; give the input whole, or use two layers"
        )
    if isinstance(input, PackedSequence):
        raise ValueError(
            "a streamed sequence must be a tensor, an array or an iterable of chunks, got a PackedSequence: pad it, or "
            'give it with output="sequence" and no `chunk_loss`'
        )


def _source(layer: Any, input: Any, weights: list[Weights], steps: int | None) -> Source:
    """Return the input as a source of segments, each checked as a whole input would be."""
    weight = weights[0].weight_ih
    # Asked here, since autocast is of a thread and `check` is called on others.
    autocast = _checks.under_autocast(weight)

    def check(x: Tensor) -> None:
        layer._check_shape(x)
        device = x.device if x.device.type in ("cpu", weight.device.type) else weight.device
        _checks.require_like("input", x, x.dtype if autocast else weight.dtype, device, "the weights")

    shape = getattr(input, "shape", None)
    B = 1 if shape is None or len(shape) < 3 else int(shape[0 if layer.batch_first else 1])
    length = steps or segment_steps(layer.cell, layer.options, weights, B, weight.dtype)
    return source_of(input, layer.batch_first, length, check)


def _states(layer: Any, source: Source, states: States | None, x: Tensor) -> States | None:
    """Check the initial states once the batch size is known."""
    return None if states is None else layer._check_states(states, x, x.shape[1], not source.unbatched)
