"""What the layers share: their keywords, their checks, and how a call becomes a run of the layers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fusedrnn import _checks
from fusedrnn.cells import CellSpec, States, Weights
from fusedrnn.functional import Options, check_resets, check_states, run_layers
from fusedrnn.layout import SequenceLayout
from fusedrnn.offloading import OffloadConfig, OffloadHooks, offloader

if TYPE_CHECKING:
    from fusedrnn.streaming import ChunkLoss


class Recurrent(nn.RNNBase):
    """What the layers share, between them and torch's class of the same name."""

    @property
    def cell(self) -> CellSpec:
        """What each layer computes."""
        raise NotImplementedError

    def __init__(
        self,
        *args: Any,
        save: str = "auto",
        chunk: int | str = "auto",
        backend: str = "auto",
        offload: bool | OffloadConfig | OffloadHooks = False,
        swap_memory: bool | OffloadConfig | OffloadHooks = False,
        clip_recurrent_grad: float | None = None,
        zoneout: float = 0.0,
        memory_budget: int | str | None = None,
        **kwargs: Any,
    ):
        if offload is not False and swap_memory is not False:
            raise ValueError("`offload` and `swap_memory` are two names of one argument, got both: give one of them")
        name, value = ("swap_memory", swap_memory) if offload is False else ("offload", offload)
        budget = _checks.budget_bytes(memory_budget)
        options = Options(save, chunk, backend, offloader(name, value), clip_recurrent_grad, zoneout, budget)
        super().__init__(*args, **kwargs)
        self.options = options
        self._choice = "it has not run yet"

    def extra_repr(self) -> str:
        """Return torch's representation with the options that are not the default."""
        default = Options()
        changed = [f"{name}={value!r}" for name, value in vars(self.options).items() if value != getattr(default, name)]
        return ", ".join([super().extra_repr(), *changed])

    @property
    def offloader(self) -> OffloadHooks | None:
        """What offloads for this layer, with `stats()`, `explain()` and `export_trace()`; None without `offload`."""
        return self.options.offload

    def explain(self) -> str:
        """Say who ran the last call, what it saved, and why, and what offloading did."""
        if self.offloader is None:
            return self._choice
        return f"{self._choice}\n{self.offloader.explain()}"

    def _run(
        self,
        input: Any,
        states: Any,
        resets: Any,
        output: str = "sequence",
        chunk_loss: Union["ChunkLoss", None] = None,
        cells: bool = False,
    ) -> tuple[list[Any], States]:
        """Run the layers; see `forward`. The states are a tuple, checked here, or None.

        Returns:
            The output, with `cells` the cell states of the last layer, and the final states as a tuple.
        """
        if output != "sequence" or chunk_loss is not None or not isinstance(input, (Tensor, PackedSequence)):
            if torch.compiler.is_compiling():
                from fusedrnn.uncompiled import run_streamed_uncompiled as run_streamed
            else:
                from fusedrnn.streaming import run_streamed
            result, states = run_streamed(self, input, states, resets, output, chunk_loss, cells)
            return [result], states
        packed = input if isinstance(input, PackedSequence) else None
        x = input.data if isinstance(input, PackedSequence) else input
        layers = self._layers()
        self._check_input(x, packed is not None, layers[0].weight_ih)
        batched = packed is not None or x.dim() == 3
        if packed is not None:
            sizes = tuple(packed.batch_sizes.tolist())
            layout = SequenceLayout(len(sizes), sizes[0], sizes)
        else:
            x = x if batched else x.unsqueeze(1)
            x = x.transpose(0, 1) if self.batch_first and batched else x
            layout = SequenceLayout(x.shape[0], x.shape[1])
        if states is not None:
            states = self._check_states(states, x, layout.batch, batched)
            states = _select(states, None if packed is None else packed.sorted_indices)
        if resets is not None:
            resets = self._check_resets(resets, x, layout, packed is not None, batched)
        out, states, choice = run_layers(
            self.cell,
            x,
            states,
            layers,
            layout,
            self.options,
            directions=2 if self.bidirectional else 1,
            dropout=self._drawn_dropout(),
            resets=resets,
            training=self.training,
            cells=cells,
        )
        if choice is not None:
            self._choice = str(choice)
        if packed is not None:
            places = packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
            return [PackedSequence(rows, *places) for rows in out], _select(states, packed.unsorted_indices)
        if not batched:
            states = tuple(state.squeeze(1) for state in states)
        return [self._arranged(rows, batched) for rows in out], states

    def _arranged(self, rows: Tensor, batched: bool) -> Tensor:
        """Return rows [T, B, features] in the user's layout."""
        if not batched:
            return rows.squeeze(1)
        return rows.transpose(0, 1) if self.batch_first else rows

    def _drawn_dropout(self) -> float:
        """Return the probability of dropout between layers, 0 where none is drawn."""
        return self.dropout if self.training and self.num_layers > 1 else 0.0

    def stream(
        self,
        input: Any,
        hx: Any = None,
        *,
        steps: int | None = None,
        backward: str = "truncated",
        resets: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Any]]:
        """Run the layers chunk by chunk, and yield the output and the state after each.

        Each chunk is a call of the layer by itself, for which dropout and zoneout are drawn anew.

        Args:
            input: What is cut into chunks: a tensor on the device or on the host, or an array of NumPy (a memory-mapped
                file); or an iterable of chunks, on the host or on the device. The next ones are fetched while one is
                computed, on a thread that works on the caller's device and stream.
            hx: Initial state, as for the layer itself.
            steps: Timesteps per chunk where `input` can be cut anywhere; None chooses by bytes.
            backward: "truncated" lets no gradient pass from a chunk to the one before: call `backward` on each chunk's
                loss within the loop. "full" keeps every chunk's graph, for one `backward` after the loop.
            resets: As for the layer itself.

        Yields:
            The output of a chunk, shaped as the chunk, and the state after it, shaped as `hx`.

        Raises:
            TypeError: If an argument is of no type that can be streamed.
            ValueError: If an argument is not among its choices, or shapes, dtypes or devices do not agree.
        """
        from fusedrnn.streaming import stream_chunks

        return stream_chunks(self, input, hx, steps, backward, resets)

    def _layers(self) -> list[Weights]:
        """Return the weights of the moment: parametrized, pruned and swapped ones included."""
        layers = []
        for layer in range(self.num_layers):
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                names = Weights(
                    *(f"{name}_l{layer}{suffix}" for name in Weights._fields)  # type: ignore[arg-type]
                )
                weights = [getattr(self, str(name), None) for name in names]
                layers.append(Weights(*weights))  # type: ignore[arg-type]
        return layers

    def _check_input(self, x: Any, packed: bool, weight: Tensor) -> None:
        self._check_shape(x, packed)
        _checks.require_like(
            "input", x, x.dtype if _checks.under_autocast(x) else weight.dtype, weight.device, "the weights"
        )

    def _check_shape(self, x: Any, packed: bool = False) -> None:
        _checks.require_tensor("input", x)
        _checks.require_floating("input", x)
        if x.dim() not in ((2,) if packed else (2, 3)):
            order = "(B, T, I)" if self.batch_first else "(T, B, I)"
            raise ValueError(f"`input` must have shape {order}, or (T, I) for one sequence, got {tuple(x.shape)}")
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"`input` must have a last dimension of `input_size` = {self.input_size}, got {x.shape[-1]} in shape "
                f"{tuple(x.shape)}"
            )

    def _check_states(self, states: tuple[Any, ...], x: Tensor, batch: int, batched: bool) -> States:
        """Check the initial states and return them with a batch dimension."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        shape = (count, batch) if batched else (count,)
        word = "num_layers * directions, B" if batched else "num_layers * directions"
        letters = [f"({word}, {'P' if self.proj_size else 'H'})", f"({word}, H)"]
        shapes = [(*shape, self.proj_size or self.hidden_size), (*shape, self.hidden_size)]
        checked = check_states(states, self.cell.states, letters, shapes, x)
        return checked if batched else tuple(state.unsqueeze(1) for state in checked)

    def _check_resets(self, resets: Any, x: Tensor, layout: SequenceLayout, packed: bool, batched: bool) -> Tensor:
        """Check the resets and return them as [T, B]."""
        if packed:
            raise ValueError(
                "`resets` must be None for a PackedSequence, got resets: pack each piece as a sequence of its own"
            )
        _checks.require_tensor("resets", resets)
        if not batched:
            _checks.require_shape("resets", resets, "(T,)", (layout.steps,))
            resets = resets.unsqueeze(1)
        elif self.batch_first:
            _checks.require_shape("resets", resets, "(B, T)", (layout.batch, layout.steps))
            resets = resets.transpose(0, 1)
        checked = check_resets(resets, layout, x)
        assert checked is not None
        return checked


def _select(states: States, indices: Tensor | None) -> States:
    """Return the states of the sequences in another order."""
    return states if indices is None else tuple(state.index_select(1, indices) for state in states)
