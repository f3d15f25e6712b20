"""What the three stages compute. No connector, no process, no clock: plain torch modules that give the same bits for
the same calls, so that a run over three processes can be compared with a run in one.

    sound --Thinker--> hidden states --Talker--> codec frames --Code2Wav--> sound

They are small stand-ins for the models of that name: the Thinker turns 10 ms frames of sound into hidden states by a
fixed random expansion of their spectrum, the Talker quantises those into integer codes, and Code2Wav turns codes into
sound again. What comes out is the recording, as a coarse speech codec would give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

SAMPLE_RATE = 16_000  # Hz; speech needs no more
FRAME = 160  # new samples per frame: 10 ms, so 100 frames a second
HIDDEN = 1024  # width of a hidden state, that of a small language model
GROUP = 2  # spectral values that one code stands for
CODEBOOKS = FRAME // GROUP  # codes per frame
LEVELS = 31  # steps per spectral value; odd, so that silence is one of them
STEP_FRAMES = 10  # frames that the Thinker thinks about at a time
COMPANDING = 60.0  # how much finer quiet values are quantised than loud ones
LOUDEST = FRAME**0.5  # spectral value of a full-scale tone, rounded up


def lapped_basis() -> Tensor:
    """The windowed MDCT basis, ``[2 * FRAME, FRAME]``: overlapping frames, no more values than samples, and the sum
    of what neighbouring frames give back is the signal.
    """
    time = torch.arange(2 * FRAME, dtype=torch.float64)[:, None]
    frequency = torch.arange(FRAME, dtype=torch.float64)
    cosines = torch.cos(math.pi / FRAME * (time + 0.5 + FRAME / 2) * (frequency + 0.5))
    window = torch.sin(math.pi * (time + 0.5) / (2 * FRAME))
    return (math.sqrt(2 / FRAME) * window * cosines).float()


def expansion() -> nn.Linear:
    """A fixed random map from spectrum to hidden state whose transpose is its inverse."""
    layer = nn.Linear(FRAME, HIDDEN, bias=False)
    nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(3))
    return layer


class Thinker(nn.Module):
    """Stage 0: sound to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = nn.Buffer(lapped_basis())
        self.expand = expansion()

    @torch.inference_mode()
    def forward(self, samples: Tensor) -> Iterator[Tensor]:
        """Yield the hidden states of a recording, ``[STEP_FRAMES, HIDDEN]`` bfloat16 each, the last one shorter.

        Args:
            samples: float32, ``[samples]``, at `SAMPLE_RATE`.
        """
        frames = math.ceil(samples.numel() / FRAME) + 1
        padded = nn.functional.pad(samples, (FRAME, (frames * FRAME) - samples.numel()))
        for first in range(0, frames, STEP_FRAMES):
            last = min(first + STEP_FRAMES, frames)
            overlapping = padded[first * FRAME : (last + 1) * FRAME].unfold(0, 2 * FRAME, FRAME)
            spectrum = overlapping @ self.basis
            loudness = torch.asinh(spectrum / LOUDEST * COMPANDING) / math.asinh(COMPANDING)
            yield self.expand(loudness).bfloat16()


class Talker(nn.Module):
    """Stage 1: hidden states to codec frames, by finite scalar quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = expansion().weight
        self.place = nn.Buffer(LEVELS ** torch.arange(GROUP))

    @torch.inference_mode()
    def forward(self, hidden: Tensor) -> Tensor:
        """``[frames, HIDDEN]`` bfloat16 to int64 codes, ``[frames, CODEBOOKS]``."""
        loudness = hidden.float() @ self.weight
        level = ((loudness.clamp(-1, 1) + 1) * (LEVELS - 1) / 2).round().long()
        return (level.view(-1, CODEBOOKS, GROUP) * self.place).sum(-1)


class CodecChunk(NamedTuple):
    """Consecutive codec frames of one request. The first ``left_context`` of them were sent before."""

    codes: Tensor
    left_context: int


class CodecChunks:
    """Cuts the codec frames of one request into chunks of ``frames`` new ones. Each also repeats up to ``context``
    frames that came before, so that the decoder keeps no state between chunks.
    """

    def __init__(self, frames: int, context: int, device: str = "cpu") -> None:
        self._frames = frames
        self._context = context
        self._left = torch.empty((0, CODEBOOKS), dtype=torch.int64, device=device)
        self._new = self._left

    def push(self, codes: Tensor) -> Iterator[CodecChunk]:
        """Add frames; yield every chunk that they complete."""
        self._new = torch.cat([self._new, codes])
        while len(self._new) >= self._frames:
            yield self._cut(self._frames)

    def flush(self) -> Iterator[CodecChunk]:
        """Yield what is left at the end of the request, if anything."""
        if len(self._new):
            yield self._cut(len(self._new))

    def _cut(self, frames: int) -> CodecChunk:
        codes = torch.cat([self._left, self._new[:frames]])
        chunk = CodecChunk(codes, left_context=len(self._left))
        self._left = codes[-self._context :] if self._context else codes[:0]
        self._new = self._new[frames:]
        return chunk


class Code2Wav(nn.Module):
    """Stage 2: codec frames to sound."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = nn.Buffer(lapped_basis())
        self.place = nn.Buffer(LEVELS ** torch.arange(GROUP))

    @torch.inference_mode()
    def forward(self, codes: Tensor, left_context: int) -> Tensor:
        """Decode one chunk on its own.

        Args:
            codes: int64, ``[left_context + frames, CODEBOOKS]``.
            left_context: how many of them were decoded before; a frame sounds right if its predecessor is there.

        Returns:
            float32, ``[frames * FRAME]``: the sound of the new frames. It lags one frame behind the recording.
        """
        level = (codes[:, :, None] // self.place % LEVELS).view(-1, FRAME).float()
        loudness = level * 2 / (LEVELS - 1) - 1
        spectrum = torch.sinh(loudness * math.asinh(COMPANDING)) / COMPANDING * LOUDEST
        halves = (spectrum @ self.basis.T).view(-1, 2, FRAME)
        sound: Tensor = halves[:, 0].clone()
        sound[1:] += halves[:-1, 1]
        return sound[left_context:].reshape(-1)


def run_in_one_process(samples: Tensor, frames: int, context: int, device: str = "cpu") -> Tensor:
    """The whole pipeline as three function calls: what a run over three processes has to equal, bit for bit."""
    thinker, talker, code2wav = (each().to(device) for each in (Thinker, Talker, Code2Wav))
    chunks = CodecChunks(frames, context, device)
    sound = []
    for hidden in thinker(samples.to(device)):
        sound += [code2wav(*chunk) for chunk in chunks.push(talker(hidden))]
    sound += [code2wav(*chunk) for chunk in chunks.flush()]
    return torch.cat(sound).cpu()
