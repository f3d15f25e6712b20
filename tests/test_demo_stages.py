"""The demo's stages, its WAV reading and its report, each on its own: no connector, no process."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.pipeline import make_recording
from examples.pipeline.messages import Count, Finished
from examples.pipeline.models import FRAME, SAMPLE_RATE, Code2Wav, CodecChunks, Talker, Thinker, run_in_one_process
from examples.pipeline.report import percentile, table
from examples.pipeline.wav import WavError, read_wav, resample, wav_bytes

RECORDING = Path(make_recording.__file__).with_name("recording.wav")


def decibels(wanted: Tensor, got: Tensor) -> float:
    """Signal to noise ratio."""
    return 10 * math.log10(wanted.square().sum() / (wanted - got).square().sum())


def tone(rate: int, seconds: float = 0.25, pitch: float = 440) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * pitch * torch.arange(round(rate * seconds)) / rate)


def riff(tag: int, bits: int, channels: int, rate: int, data: bytes, size: int | None = None) -> bytes:
    """A WAV written by hand, so that the reader is not tested with the writer."""
    align = channels * bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, channels, rate, rate * align, align, bits)
    odd = struct.pack("<4sI", b"LIST", 3) + b"abc\0"
    body = form + odd + struct.pack("<4sI", b"data", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


# --- the stages --------------------------------------------------------------------------------------------


def test_what_comes_out_is_recognisably_the_recording() -> None:
    samples, rate = read_wav(RECORDING)
    assert rate == SAMPLE_RATE
    sound = run_in_one_process(samples, frames=25, context=25)
    assert decibels(samples, sound[FRAME : FRAME + len(samples)]) > 15


@pytest.mark.parametrize("frames", [1, 7, 25, 10_000])
def test_how_the_codes_are_cut_into_chunks_makes_no_difference(frames: int) -> None:
    samples = tone(SAMPLE_RATE, seconds=0.1)
    # Not bit for bit: a matrix product may round differently for another number of rows.
    torch.testing.assert_close(run_in_one_process(samples, frames, 25), run_in_one_process(samples, 10, 1))


def test_without_left_context_the_chunk_borders_are_audible() -> None:
    samples = tone(SAMPLE_RATE)
    assert decibels(run_in_one_process(samples, 5, 1), run_in_one_process(samples, 5, 0)) < 20


def test_hidden_states_and_codes_have_the_shapes_that_the_stages_promise() -> None:
    hidden = list(Thinker()(tone(SAMPLE_RATE)))
    assert [len(h) for h in hidden] == [10, 10, 6]
    assert all(h.dtype == torch.bfloat16 and h.shape[1] == 1024 for h in hidden)
    codes = Talker()(hidden[0])
    assert codes.dtype == torch.int64
    assert codes.shape == (10, 80)
    assert codes.min() >= 0
    assert codes.max() < 31**2
    assert Code2Wav()(codes, left_context=4).shape == (6 * FRAME,)


def test_silence_stays_silent() -> None:
    assert not run_in_one_process(torch.zeros(1000), 25, 25).any()


def test_chunks_carry_up_to_the_context_and_nothing_is_cut_twice() -> None:
    chunks = CodecChunks(frames=4, context=6)
    codes = torch.arange(11 * 80).view(11, 80)
    cut = [*chunks.push(codes[:3]), *chunks.push(codes[3:9]), *chunks.push(codes[9:]), *chunks.flush(), *chunks.flush()]
    assert [(len(c.codes), c.left_context) for c in cut] == [(4, 0), (8, 4), (9, 6)]
    assert torch.equal(torch.cat([c.codes[c.left_context :] for c in cut]), codes)
    assert torch.equal(cut[2].codes[:6], codes[2:8])


# --- WAV files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tag", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_sample_format_is_read(tmp_path: Path, tag: int, bits: int, channels: int) -> None:
    wanted = tone(8000, seconds=0.02)
    data = bytearray()
    for value in wanted.double().tolist():
        whole = round(value * (2 ** (bits - 1) - 1))
        if tag == 3:
            one = struct.pack("<f" if bits == 32 else "<d", value)
        elif bits == 8:
            one = bytes([whole + 128])
        else:
            one = whole.to_bytes(bits // 8, "little", signed=True)
        data += one * channels
    (tmp_path / "in.wav").write_bytes(riff(tag, bits, channels, 8000, bytes(data)))
    samples, rate = read_wav(tmp_path / "in.wav")
    assert rate == 8000
    assert samples.dtype == torch.float32
    torch.testing.assert_close(samples, wanted, atol=2.0 ** -(min(bits, 24) - 2), rtol=0)


def test_stereo_is_mixed_down(tmp_path: Path) -> None:
    (tmp_path / "in.wav").write_bytes(riff(1, 16, 2, 8000, struct.pack("<4h", 16384, 0, -16384, -16384)))
    samples, _ = read_wav(tmp_path / "in.wav")
    assert samples.tolist() == [0.25, -0.5]


def test_a_header_written_to_a_pipe_is_understood(tmp_path: Path) -> None:
    (tmp_path / "in.wav").write_bytes(riff(1, 16, 1, 8000, struct.pack("<2h", 16384, 8192), size=0xFFFFFFFF))
    assert read_wav(tmp_path / "in.wav")[0].tolist() == [0.5, 0.25]


def test_an_extensible_header_is_understood(tmp_path: Path) -> None:
    form = struct.pack("<HHIIHHHHIH14s", 0xFFFE, 1, 8000, 16000, 2, 16, 22, 16, 4, 1, bytes(14))
    body = struct.pack("<4sI", b"fmt ", len(form)) + form + struct.pack("<4sI2h", b"data", 4, 16384, 8192)
    (tmp_path / "in.wav").write_bytes(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body)
    assert read_wav(tmp_path / "in.wav")[0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a RIFF/WAVE file"),
        (b"ID3\x04 an mp3, in truth", "not a RIFF/WAVE file"),
        (b"RIFF\x04\0\0\0WAVE", "no fmt chunk"),
        (riff(1, 16, 1, 8000, b"")[:-8], "no data chunk"),
        (riff(1, 16, 1, 8000, b""), "holds no sound"),
        (riff(1, 16, 1, 8000, b"\0"), "holds no sound"),
        (riff(1, 16, 1, 8000, b"\0" * 10, size=100), "cut off: 100 bytes of sound announced, 10 present"),
        (riff(2, 4, 1, 8000, b"\0" * 10), "format tag 2 with 4 bits"),
        (riff(1, 12, 1, 8000, b"\0" * 10), "format tag 1 with 12 bits"),
        (riff(1, 16, 6, 8000, b"\0" * 24), "6 channels"),
        (riff(1, 16, 1, 10, b"\0" * 24), "10 Hz"),
        (riff(3, 32, 1, 8000, struct.pack("<f", math.nan)), "not numbers"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_file_and_the_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "in.wav"
    file.write_bytes(content)
    with pytest.raises(WavError, match=message) as caught:
        read_wav(file)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000, 192000])
def test_any_rate_becomes_the_rate_of_the_models(rate: int) -> None:
    got = resample(tone(rate), rate, SAMPLE_RATE)
    wanted = tone(SAMPLE_RATE)
    assert len(got) == pytest.approx(len(wanted), abs=1)
    inner = slice(400, len(wanted) - 400)  # away from the abrupt ends of the tone
    assert decibels(wanted[inner], got[inner]) > 50


def test_a_written_wav_is_read_back_within_one_step(tmp_path: Path) -> None:
    samples = tone(SAMPLE_RATE)
    (tmp_path / "out.wav").write_bytes(wav_bytes(samples, SAMPLE_RATE))
    again, rate = read_wav(tmp_path / "out.wav")
    assert rate == SAMPLE_RATE
    torch.testing.assert_close(again, samples, atol=2 / 32768, rtol=0)


def test_the_recording_is_what_its_script_makes(tmp_path: Path) -> None:
    (tmp_path / "again.wav").write_bytes(wav_bytes(make_recording.sing(), make_recording.RATE))
    again, _ = read_wav(tmp_path / "again.wav")
    torch.testing.assert_close(again, read_wav(RECORDING)[0], atol=2 / 32768, rtol=0)


# --- the report --------------------------------------------------------------------------------------------


def finished(pid: int, written: int, *, first_sent: float = 0.0, last_arrived: float = 0.0) -> Finished:
    """A stage through which nothing has passed."""
    return Finished(pid, "shm", written, {}, {}, [], first_sent, last_arrived)


def test_the_table_says_what_the_stages_counted_and_how_long_it_took() -> None:
    stages = [finished(11, 4), finished(12, 200, first_sent=10.0, last_arrived=12.0), finished(13, 0)]
    stages[0].put["0_1"] = Count(4, 1)
    stages[1].got["0_1"] = Count(3, 5_000_000)
    stages[1].latencies.extend([0.004, 0.001, 0.003, 0.0025])
    stages[1].put["1_2"] = Count(200, 1)
    stages[2].got["1_2"] = Count(199, 1_234_567)
    stages[2].latencies.extend(number / 1000 for number in range(200, 0, -1))
    stages[2].first_sent, stages[2].last_arrived = 1.0, 1.5
    heading, first, second = (re.split(" {2,}", line.strip()) for line in table(stages).splitlines())
    assert heading == ["edge", "from pid", "to pid", "put", "shm wrote", "got", "bytes", "p50", "p99", "MB/s"]
    assert first[1:] == ["11", "12", "4", "4", "3", "5,000,000", "2.50 ms", "4.00 ms", "2.5"]
    assert second[1:] == ["12", "13", "200", "200", "199", "1,234,567", "100.00 ms", "198.00 ms", "2.5"]
    assert (first[0], second[0]) == ("0 -> 1 hidden states", "1 -> 2 codec frames")


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 50), (99, 99), (100, 100)])
def test_so_many_percent_of_the_values_do_not_exceed_a_percentile(percent: int, value: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], percent) == value
    assert percentile([7.0], percent) == 7
