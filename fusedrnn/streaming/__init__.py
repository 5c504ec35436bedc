"""Sequences that are never whole on the device: input, output and loss go segment by segment."""

from fusedrnn.streaming.layer import run_streamed, stream_chunks
from fusedrnn.streaming.segments import ChunkLoss

__all__ = ["ChunkLoss", "run_streamed", "stream_chunks"]
