"""What backends with a data flow of their own share: the layout of a slot, and the gradient of a layer's input."""

import torch
from torch import Tensor

from fusedrnn.backends.base import Call, ChunkedBackend, Gradients, Task, Workspace
from fusedrnn.backends.rows import Field, chunk_steps


class SlottedBackend(ChunkedBackend):
    """Base of the backends with a data flow of their own."""

    def fields(self, task: Task, rows: int, dtype: torch.dtype) -> list[Field]:
        """Lay out the slot of a chunk of `rows` rows."""
        raise NotImplementedError

    def slot_bytes(self, task: Task, rows: int, dtype: torch.dtype) -> int:
        """See `ChunkedBackend.slot_bytes`."""
        fields = self.fields(task, rows, dtype)
        return fields[-1].stop if fields else 0

    def chunk_steps(self, call: Call) -> int:
        """See `ChunkedBackend.chunk_steps`."""
        return chunk_steps(call)


def pass_down(index: int, dgates: Tensor, weight_ih: Tensor, grads: Gradients, work: Workspace) -> Tensor | None:
    """Compute the gradient of a layer's input from that of its projection [rows, GH].

    Args:
        index: The layer's place in the stack.
        dgates: Gradient of the projection.
        weight_ih: [GH, I].
        grads: Where the gradient of the first layer's input goes.
        work: Scratch buffers.

    Returns:
        The gradient of the output of the layer below, [rows, P], scratch; None for the first layer.
    """
    if index > 0:
        return torch.mm(dgates, weight_ih, out=work.get("dy", (len(dgates), weight_ih.shape[1]), dgates.dtype))
    if grads.dx is not None:
        grads.dx.addmm_(dgates, weight_ih, beta=1 if grads.add else 0)
    return None
