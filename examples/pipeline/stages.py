"""What each stage does with its connector: the first sends, the second receives and sends, the third receives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
import trio
from torch import Tensor

import trio_mori
from examples.pipeline.messages import Progress, Request, tell
from examples.pipeline.models import FRAME, SAMPLE_RATE, STEP_FRAMES, Code2Wav, CodecChunks, Talker, Thinker
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


class ThinkerStage:
    """Stage 0: speaks each request, at ``speed`` times real time or (0) as fast as it goes."""

    def __init__(self, sounds: Mapping[str, Tensor], *, speed: float, device: str) -> None:
        self.handoffs = Handoffs()
        self._sounds = {request: samples.to(device) for request, samples in sounds.items()}
        self._speed = speed
        self._thinker = Thinker().to(device)

    async def handle(self, conn: trio_mori.Connector, request: Request) -> None:
        """Send the hidden states of one request."""
        start = trio.current_time()
        # Requests take turns within the time of a step, or the table would show how chunks queue behind each other.
        spoken = list(self._sounds).index(request.id) * STEP_FRAMES * FRAME // len(self._sounds)
        async with conn.open_chunk_sender(request.id, to_stage="1") as out:
            for hidden in self._thinker(self._sounds[request.id]):
                if self._speed:
                    await trio.sleep_until(start + spoken / SAMPLE_RATE / self._speed)
                await out.send(HiddenStates(hidden, time.monotonic()))
                self.handoffs.passed(len(hidden))
                spoken += len(hidden) * FRAME


class TalkerStage:
    """Stage 1: makes codec frames of hidden states, and sends them in chunks with left context."""

    def __init__(self, *, frames: int, context: int, device: str) -> None:
        self.handoffs = Handoffs()
        self._frames = frames
        self._context = context
        self._device = device
        self._talker = Talker().to(device)

    async def handle(self, conn: trio_mori.Connector, request: Request) -> None:
        """Receive and send: a middle stage uses one connector for both."""
        chunks = CodecChunks(self._frames, self._context, self._device)
        async with (
            conn.open_chunk_receiver(request.id, from_stage="0") as arriving,
            conn.open_chunk_sender(request.id, to_stage="2") as out,
        ):
            async for states in arriving:
                assert isinstance(states, HiddenStates)
                self.handoffs.arrived(states.sent, frames=len(states.hidden))
                for chunk in chunks.push(self._talker(states.hidden)):
                    await out.send(CodecFrames(*chunk, time.monotonic()))
            for chunk in chunks.flush():
                await out.send(CodecFrames(*chunk, time.monotonic()))


class Code2WavStage:
    """Stage 2: decodes codec frames, and writes a WAV for each request."""

    def __init__(self, *, device: str) -> None:
        self.handoffs = Handoffs()
        self._code2wav = Code2Wav().to(device)

    async def handle(self, conn: trio_mori.Connector, request: Request) -> None:
        """Receive until the request is over, then write."""
        sound = []
        async with conn.open_chunk_receiver(request.id, from_stage="1") as arriving:
            async for frames in arriving:
                assert isinstance(frames, CodecFrames)
                self.handoffs.arrived(frames.sent, frames=len(frames.codes) - frames.left_context)
                sound.append(self._code2wav(frames.codes, frames.left_context))
        await trio.Path(request.out).write_bytes(wav_bytes(torch.cat(sound).cpu(), SAMPLE_RATE))


Stage = ThinkerStage | TalkerStage | Code2WavStage
