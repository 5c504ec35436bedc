"""The GRU step by step with Triton: products by torch, then one fused pointwise kernel."""

from collections.abc import Mapping

from torch import Tensor

from fusedrnn.backends.base import Call, Workspace
from fusedrnn.backends.graphs import GraphCache, constants_of, over, tensors_of
from fusedrnn.backends.gru import GRUBackend, GRUBuffers
from fusedrnn.backends.triton_base import triton_refusals
from fusedrnn.cells import Weights
from fusedrnn.layout import Steps


class GRUTritonStep(GRUBackend):
    """The elementwise part in Triton kernels; short steps are replayed from a CUDA graph."""

    name = "triton_step"

    def __init__(self) -> None:
        self.graphs = GraphCache()

    def refusals(self, call: Call) -> list[str]:
        """See `Backend.refusals`."""
        return triton_refusals(call)

    def _replayed(self, buffers: GRUBuffers, steps: Steps) -> bool:
        """Whether a chunk goes through a CUDA graph; packed chunks do not, their shapes vary."""
        return steps.row_step is not None and self.graphs.worthwhile(buffers.gates, len(steps))

    def launch_forward(
        self, weights: Weights, buffers: GRUBuffers, h0: Tensor, steps: Steps, store: bool, work: Workspace
    ) -> None:
        """See `GRUBackend.launch_forward`."""
        launch = super().launch_forward
        if not self._replayed(buffers, steps):
            launch(weights, buffers, h0, steps, store, work)
            return

        def body(t: Mapping[str, Tensor]) -> None:
            recurrent = weights._replace(weight_hh=t["weight_hh"], bias_hh=t.get("bias_hh"))
            # Scratch must live as long as the graph, so it comes from the graph's own memory.
            launch(recurrent, over(buffers, t), t["h0"], steps, store, Workspace(t["h0"].device))

        tensors = tensors_of(buffers) | {"weight_hh": weights.weight_hh, "h0": h0}
        tensors |= {} if weights.bias_hh is None else {"bias_hh": weights.bias_hh}
        results = {"h": buffers.h} | ({"gates": buffers.gates, "hn": buffers.hn} if store else {})
        key = "forward", len(steps), steps.row_step, store, constants_of(buffers)
        self.graphs.run(key, body, tensors, results)

    def recurrence_backward(
        self, weights: Weights, buffers: GRUBuffers, h0: Tensor, dy: Tensor | None, dh: Tensor, steps: Steps
    ) -> None:
        """See `GRUBackend.recurrence_backward`."""
        launch = super().recurrence_backward
        if not self._replayed(buffers, steps):
            launch(weights, buffers, h0, dy, dh, steps)
            return

        def body(t: Mapping[str, Tensor]) -> None:
            recurrent = weights._replace(weight_hh=t["weight_hh"])
            launch(recurrent, over(buffers, t), t["h0"], t.get("dy"), t["dh"], steps)

        results = {"gates": buffers.gates, "hn": buffers.hn, "dh": dh}
        tensors = tensors_of(buffers) | results | {"weight_hh": weights.weight_hh, "h0": h0}
        tensors |= {} if dy is None else {"dy": dy}
        key = "backward", len(steps), steps.row_step, constants_of(buffers)
        self.graphs.run(key, body, tensors, results)

    def step_forward(self, pre: Tensor, hproj: Tensor, h_prev: Tensor, h: Tensor, hn: Tensor | None) -> None:
        """See `GRUBackend.step_forward`."""
        from fusedrnn.kernels.gru_step import gru_step_forward

        gru_step_forward(pre, hproj, h_prev, h, hn)

    def activate(self, pre: Tensor, hproj: Tensor, hn: Tensor) -> None:
        """See `GRUBackend.activate`."""
        from fusedrnn.kernels.gru_step import gru_step_forward

        gru_step_forward(pre, hproj, None, None, hn)

    def step_backward(
        self, prepared: None, buffers: GRUBuffers, rows: slice, h_prev: Tensor, dy: Tensor | None, dh: Tensor
    ) -> None:
        """See `GRUBackend.step_backward`."""
        from fusedrnn.kernels.gru_step import gru_step_backward

        gru_step_backward(buffers.gates[rows], buffers.hn[rows], h_prev, dy, dh)
