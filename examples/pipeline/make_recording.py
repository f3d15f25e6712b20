"""Makes `recording.wav`, the sound that the demo uses when none is named: a voice-like synthesiser sings a few vowels.

python -m examples.pipeline.make_recording
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from examples.pipeline.wav import wav_bytes

RATE = 16_000
GLIDE = 0.04  # seconds in which pitch and vowel move to the next note


class Note(NamedTuple):
    """One sung syllable: how long (seconds), how high (Hz), which vowel, and whether it begins with an s."""

    length: float
    pitch: float
    vowel: str
    hiss: bool


# Centre frequencies (Hz) of the first three formants, from Peterson and Barney's measurements (1952), rounded.
VOWELS = {"a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410)}
SONG = [
    Note(0.34, 131, "a", hiss=True),
    Note(0.34, 147, "i", hiss=False),
    Note(0.50, 165, "o", hiss=True),
    Note(0.30, 196, "e", hiss=False),
    Note(0.30, 165, "i", hiss=True),
    Note(0.40, 147, "a", hiss=False),
    Note(0.36, 110, "o", hiss=True),
    Note(0.90, 131, "a", hiss=False),
]


def curve(values: list[float]) -> Tensor:
    """One value per note, held for the note's length and smoothed where it changes."""
    held = torch.cat([torch.full((round(note.length * RATE),), float(v)) for note, v in zip(SONG, values, strict=True)])
    window = torch.hann_window(round(GLIDE * RATE) | 1)
    padded = torch.nn.functional.pad(held[None, None], (len(window) // 2,) * 2, mode="replicate")
    return torch.nn.functional.conv1d(padded, (window / window.sum())[None, None])[0, 0]


def sing() -> Tensor:
    """The song, float32 in [-1, 1]."""
    pitch = curve([note.pitch for note in SONG])
    formants = [curve([float(VOWELS[note.vowel][i]) for note in SONG]) for i in range(3)]
    clock = torch.arange(len(pitch)) / RATE
    phase = torch.cumsum(pitch * (1 + 0.012 * torch.sin(2 * math.pi * 5.5 * clock)) / RATE, 0) * 2 * math.pi
    voice = torch.zeros_like(pitch)
    for harmonic in range(1, 50):
        frequency = harmonic * pitch
        colour = sum((1 / (1 + ((frequency - f) / (60 + 30 * i)) ** 2) for i, f in enumerate(formants)), torch.zeros(1))
        audible = (frequency < 0.45 * RATE).float()
        voice += audible * (0.02 + colour) / harmonic**0.7 * torch.sin(harmonic * phase)
    noise = torch.randn(len(pitch), generator=torch.Generator().manual_seed(11))
    hiss = torch.cat([noise[:1], noise[1:] - 0.9 * noise[:-1]])
    return mix(voice, hiss)


def mix(voice: Tensor, hiss: Tensor) -> Tensor:
    """Fade every note in and out, and put the hiss before the notes that have one."""
    sound = torch.zeros_like(voice)
    first = 0
    for note in SONG:
        last = first + round(note.length * RATE)
        clock = torch.arange(last - first) / RATE
        onset = 0.09 if note.hiss else 0.0
        fade = ((clock - onset) / 0.03).clamp(0, 1) * ((note.length - clock) / 0.06).clamp(0, 1)
        sound[first:last] = voice[first:last] * fade
        if note.hiss:
            sound[first:last] += 0.25 * hiss[first:last] * torch.sin((clock / onset).clamp(0, 1) * math.pi)
        first = last
    return 0.8 * sound / sound.abs().max()


if __name__ == "__main__":
    Path(__file__).with_name("recording.wav").write_bytes(wav_bytes(sing(), RATE))
