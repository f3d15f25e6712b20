"""What each stage does with the connector: `think` sends, `talk` receives and sends, `decode` receives."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import trio
from torch import Tensor

import trio_mori
from examples.pipeline.messages import Progress, Request, tell
from examples.pipeline.models import FRAME, SAMPLE_RATE, Code2Wav, CodecChunks, Talker, Thinker
from examples.pipeline.wav import wav_bytes


class HiddenStates(NamedTuple):
    """A chunk on the way from Thinker to Talker; ``sent`` is when, on the clock that all processes share."""

    hidden: Tensor
    sent: float


class CodecFrames(NamedTuple):
    """A chunk on the way from Talker to Code2Wav: a `CodecChunk`, and when it was sent."""

    codes: Tensor
    left_context: int
    sent: float


CHUNK_TYPES = (HiddenStates, CodecFrames)  # what a connector may make of a payload, beside tensors and containers


class Handoffs:
    """How long chunks took from the start of `send` in one process until the next one had them.

    The time of sending travels in the chunk; on Linux the monotonic clock is the same in all processes.
    """

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.first_sent = self.last_arrived = 0.0
        self._frames = 0

    def arrived(self, sent: float, frames: int) -> None:
        """Note one chunk, now."""
        self.last_arrived = time.monotonic()
        self.first_sent = self.first_sent or sent
        self.latencies.append(self.last_arrived - sent)
        self.passed(frames)

    def passed(self, frames: int) -> None:
        """Tell the parent how far this stage is."""
        self._frames += frames
        tell(Progress(self._frames))


async def think(
    conn: trio_mori.Connector, request: Request, samples: Tensor, handoffs: Handoffs, *, speed: float
) -> None:
    """Stage 0: send the hidden states of one request, at ``speed`` times the pace at which it was spoken."""
    thinker = Thinker()
    spoken = 0
    start = trio.current_time()
    async with conn.open_chunk_sender(request.id, to_stage="1") as out:
        for hidden in thinker(samples):
            await out.send(HiddenStates(hidden, time.monotonic()))
            handoffs.passed(len(hidden))
            spoken += len(hidden) * FRAME
            if speed:
                await trio.sleep_until(start + spoken / SAMPLE_RATE / speed)


async def talk(conn: trio_mori.Connector, request: Request, handoffs: Handoffs, *, frames: int, context: int) -> None:
    """Stage 1: hidden states in, chunks of codec frames out."""
    talker, chunks = Talker(), CodecChunks(frames, context)
    async with (
        conn.open_chunk_receiver(request.id, from_stage="0") as arriving,
        conn.open_chunk_sender(request.id, to_stage="2") as out,
    ):
        async for states in arriving:
            assert isinstance(states, HiddenStates)
            handoffs.arrived(states.sent, frames=len(states.hidden))
            for chunk in chunks.push(talker(states.hidden)):
                await out.send(CodecFrames(*chunk, time.monotonic()))
        for chunk in chunks.flush():
            await out.send(CodecFrames(*chunk, time.monotonic()))


async def decode(conn: trio_mori.Connector, request: Request, handoffs: Handoffs) -> None:
    """Stage 2: chunks of codec frames in, a WAV out."""
    code2wav = Code2Wav()
    sound = []
    async with conn.open_chunk_receiver(request.id, from_stage="1") as arriving:
        async for frames in arriving:
            assert isinstance(frames, CodecFrames)
            handoffs.arrived(frames.sent, frames=len(frames.codes) - frames.left_context)
            sound.append(code2wav(frames.codes, frames.left_context))
    await trio.Path(request.out).write_bytes(wav_bytes(torch.cat(sound), SAMPLE_RATE))
