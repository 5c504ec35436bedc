"""Step by step with Triton: a product by torch, then one fused pointwise kernel."""

from collections.abc import Mapping

from torch import Tensor

from fusedrnn.backends.base import Workspace
from fusedrnn.backends.fused import LayerBuffers
from fusedrnn.backends.graphs import GraphCache, constants_of, over, tensors_of
from fusedrnn.backends.step import StepBackend
from fusedrnn.backends.triton_base import TritonBackend
from fusedrnn.cells import Weights
from fusedrnn.layout import Steps


class TritonStep(TritonBackend, StepBackend):
    """A chunk's recurrence with one product and one kernel launch per step."""

    name = "triton_step"

    def __init__(self) -> None:
        self.graphs = GraphCache()

    def _replayed(self, weights: Weights, buffers: LayerBuffers, steps: Steps) -> bool:
        """Whether a chunk goes through a CUDA graph; packed chunks and projections do not, their shapes vary."""
        plain = steps.row_step is not None and weights.weight_hr is None
        return plain and self.graphs.worthwhile(buffers.gates, len(steps))

    def launch_forward(
        self,
        weights: Weights,
        buffers: LayerBuffers,
        h0: Tensor,
        c0: Tensor,
        steps: Steps,
        store: bool,
        work: Workspace,
    ) -> None:
        """See `StepBackend.launch_forward`; short steps are replayed from a CUDA graph."""
        if not self._replayed(weights, buffers, steps):
            super().launch_forward(weights, buffers, h0, c0, steps, store, work)
            return
        assert buffers.c is not None
        launch = super().launch_forward

        def body(t: Mapping[str, Tensor]) -> None:
            recurrent = weights._replace(weight_hh=t["weight_hh"])
            launch(recurrent, over(buffers, t), t["h0"], t["c0"], steps, store, work)

        tensors = tensors_of(buffers) | {"weight_hh": weights.weight_hh, "h0": h0, "c0": c0}
        results = {"c": buffers.c, "h": buffers.h} | ({"gates": buffers.gates} if store else {})
        key = "forward", len(steps), steps.row_step, store, constants_of(buffers)
        self.graphs.run(key, body, tensors, results)

    def recurrence_backward(
        self,
        weights: Weights,
        buffers: LayerBuffers,
        c0: Tensor,
        dy: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dproj: Tensor | None,
        steps: Steps,
        work: Workspace,
    ) -> None:
        """See `FusedBackend.recurrence_backward`; short steps are replayed from a CUDA graph."""
        launch = super().recurrence_backward
        if not self._replayed(weights, buffers, steps):
            launch(weights, buffers, c0, dy, dh, dc, dproj, steps, work)
            return

        def body(t: Mapping[str, Tensor]) -> None:
            recurrent = weights._replace(weight_hh=t["weight_hh"])
            launch(recurrent, over(buffers, t), t["c0"], t.get("dy"), t["dh"], t["dc"], None, steps, work)

        results = {"gates": buffers.gates, "dh": dh, "dc": dc}
        tensors = tensors_of(buffers) | results | {"weight_hh": weights.weight_hh, "c0": c0}
        tensors |= {} if dy is None else {"dy": dy}
        del tensors["h"]  # not read
        key = "backward", len(steps), steps.row_step, constants_of(buffers)
        self.graphs.run(key, body, tensors, results)

    def step_forward(self, pre: Tensor, c_prev: Tensor, h: Tensor, c: Tensor, store: bool) -> None:
        """See `StepBackend.step_forward`."""
        from fusedrnn.kernels.lstm_step import lstm_step_forward

        lstm_step_forward(pre, c_prev, h, c, store_gates=store)

    def begin_backward(self, buffers: LayerBuffers, c0: Tensor, steps: Steps, work: Workspace) -> None:
        """See `StepBackend.begin_backward`: there is nothing to prepare."""

    def step_backward(
        self,
        prepared: None,
        buffers: LayerBuffers,
        rows: slice,
        c_prev: Tensor,
        dy: Tensor | None,
        dh: Tensor | None,
        dc: Tensor,
    ) -> None:
        """See `StepBackend.step_backward`."""
        from fusedrnn.kernels.lstm_step import lstm_step_backward

        assert buffers.c is not None
        gates = buffers.gates[rows]
        lstm_step_backward(gates, c_prev, buffers.c[rows], dy, dh, dc, gates)
