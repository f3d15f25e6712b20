"""WAV files in and out, and resampling. Any PCM or float WAV goes in; 16-bit mono comes out."""

from __future__ import annotations

import math
import struct
import wave
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # format tags of the RIFF/WAVE specification
UNKNOWN_SIZES = (0, 0xFFFFFFFF)  # what programs that write to a pipe leave in the header
TAPS = 16  # zero crossings of the sinc kept on each side; more is not audible in speech
BLOCK = 8192  # output samples resampled at a time, so that an hour of sound needs no more memory than a second


class WavError(ValueError):
    """The file is not a WAV that can be read; the message says why and what to do."""


class Format(NamedTuple):
    """The part of a WAV's ``fmt`` chunk that decides how its samples are read."""

    tag: int
    channels: int
    rate: int
    bits: int


def read_wav(path: Path) -> tuple[Tensor, int]:
    """Read a recording.

    Returns:
        The samples, mono, float32 in [-1, 1] with shape ``[samples]``, and their rate in Hz.

    Raises:
        WavError: not a WAV, or of a kind that is not supported.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    try:
        form, data = _chunks(content)
        samples = _decode(form, data)
    except WavError as error:
        raise WavError(f"{path}: {error}") from None
    return samples, form.rate


def _chunks(content: bytes) -> tuple[Format, bytes]:
    """Find the two chunks that matter, and check that they are what they say."""
    if len(content) < 12 or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise WavError("not a RIFF/WAVE file; convert it first, for example with: ffmpeg -i FILE out.wav")
    form: Format | None = None
    position = 12
    while position + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, position)
        position += 8
        left = len(content) - position
        if name == b"data":
            if form is None:
                raise WavError("its data chunk comes before its fmt chunk")
            if size in UNKNOWN_SIZES:
                size = left
            if size > left:
                raise WavError(f"it is cut off: {size} bytes of sound announced, {left} present")
            return form, content[position : position + size]
        if name == b"fmt ":
            form = _format(content[position : position + size])
        position += size + size % 2
    raise WavError("it has no fmt chunk" if form is None else "it has no data chunk")


def _format(chunk: bytes) -> Format:
    if len(chunk) < 16:
        raise WavError(f"its fmt chunk has {len(chunk)} bytes, at least 16 are needed")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)  # the sub-format's GUID begins with the plain tag
    if (tag, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
        raise WavError(
            f"format tag {tag} with {bits} bits per sample is not supported; "
            "8, 16, 24 or 32 bit PCM and 32 or 64 bit float are (ffmpeg -i FILE -c:a pcm_s16le out.wav)"
        )
    if channels not in (1, 2):
        raise WavError(f"it has {channels} channels; mono and stereo are supported (ffmpeg -i FILE -ac 1 out.wav)")
    if not 1_000 <= rate <= 768_000:
        raise WavError(f"its sample rate is {rate} Hz; 1000 to 768000 are supported")
    return Format(tag, channels, rate, bits)


def _decode(form: Format, data: bytes) -> Tensor:
    width = form.bits // 8
    data = data[: len(data) - len(data) % (width * form.channels)]
    if not data:
        raise WavError("it holds no sound")
    raw = bytearray(data)
    if form.tag == FLOAT:
        samples = torch.frombuffer(raw, dtype=torch.float32 if width == 4 else torch.float64).double()
        if not bool(samples.isfinite().all()):
            raise WavError("it holds samples that are not numbers (NaN or infinity)")
    elif width == 1:
        samples = (torch.frombuffer(raw, dtype=torch.uint8).double() - 128) / 128
    elif width == 3:
        low, middle, high = torch.frombuffer(raw, dtype=torch.uint8).to(torch.int32).view(-1, 3).unbind(1)
        samples = ((low << 8 | middle << 16 | high << 24) >> 8).double() / 2**23
    else:
        samples = torch.frombuffer(raw, dtype=torch.int16 if width == 2 else torch.int32).double() / 2 ** (
            form.bits - 1
        )
    mono = samples.view(-1, form.channels).mean(1)
    return (mono / mono.abs().max().clamp_min(1.0)).float()


def resample(samples: Tensor, rate: float, target: float) -> Tensor:
    """Change the sample rate by windowed-sinc interpolation: ``[samples]`` in, ``[samples * target / rate]`` out."""
    if rate == target:
        return samples
    step = rate / target
    cutoff = min(1.0, 1 / step)
    half = math.ceil(TAPS / cutoff)
    padded = torch.nn.functional.pad(samples.double(), (half, half))
    taps = torch.arange(1 - half, half + 1)
    pieces = []
    for start in range(0, math.ceil(samples.numel() / step), BLOCK):
        stop = min(start + BLOCK, math.ceil(samples.numel() / step))
        times = torch.arange(start, stop, dtype=torch.float64) * step
        nearest = times.floor().long()[:, None] + taps
        distance = times[:, None] - nearest
        window = torch.cos(distance * (math.pi / 2 / half)).square()
        kernel = torch.sinc(distance * cutoff) * window * cutoff
        pieces.append((padded[(nearest + half).clamp_max(padded.numel() - 1)] * kernel).sum(1))
    return torch.cat(pieces).float()


def wav_bytes(samples: Tensor, rate: int) -> bytes:
    """A whole 16-bit mono WAV file of samples in [-1, 1]; what lies outside is clipped."""
    pcm = bytearray(2 * samples.numel())
    if pcm:
        torch.frombuffer(pcm, dtype=torch.int16).copy_((samples.double() * 32767).round().clamp(-32768, 32767))
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm)
    return file.getvalue()
