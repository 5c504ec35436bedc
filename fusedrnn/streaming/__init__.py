"""Sequences that are never whole on the device: input, output and loss go segment by segment."""

from fusedrnn.streaming.layer import is_streamed, run_streamed, stream_chunks
from fusedrnn.streaming.segments import ChunkLoss

__all__ = ["ChunkLoss", "is_streamed", "run_streamed", "stream_chunks"]
