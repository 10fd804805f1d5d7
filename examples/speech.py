"""Synthesised speech for deepspeech.py: spoken numbers, by tones or by espeak-ng.

A voice has a pitch and a speed. Some voices speak only on the held-out side. With tones, each
letter of a word sounds as its own two tones, as the keys of a telephone do.
"""

from __future__ import annotations

import io
import os
import subprocess
import wave

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RATE = 8000  # samples per second
BANDS, WINDOW, HOP = 40, 256, 96  # of the spectrogram: frequencies, and samples of a frame
VOICES = [(pitch, speed) for pitch in (20, 40, 60, 80) for speed in (120, 150, 180)]
HELD_OUT = [(30, 165), (70, 135)]

Voice = tuple[int, int]


def synthesizer() -> str:
    """The speaker: tones, or espeak-ng if the environment has SPEECH=espeak-ng."""
    return "espeak-ng" if os.environ.get("SPEECH") == "espeak-ng" else "tones"


def spoken(by: str, voices: list[Voice]) -> dict[tuple[str, Voice], Tensor]:
    """Each word in each voice: samples, a float tensor of one dimension."""
    speak = of_tones if by == "tones" else by_espeak
    return {(word, voice): speak(word, voice) for word in WORDS for voice in voices}


def of_tones(word: str, voice: Voice) -> Tensor:
    """Two tones per letter, by its place in the alphabet."""
    pitch, speed = voice
    time = torch.arange(int(RATE * 9 / speed)) / RATE  # 50 to 75 ms per letter
    fades = torch.hann_window(len(time)).sqrt()
    sounds = []
    for letter in map(ord, word):
        row, column = divmod(letter - ord("a"), 6)
        low, high = (600 + 170 * row) * (0.95 + pitch / 1000), 1700 + 260 * column
        sounds.append(fades * sum((2 * torch.pi * f * time).sin() for f in (low, high)))
    return torch.cat(sounds)


def by_espeak(word: str, voice: Voice) -> Tensor:
    """The word as espeak-ng speaks it."""
    command = ["espeak-ng", "--stdout", "-p", str(voice[0]), "-s", str(voice[1]), word]
    said = subprocess.run(command, check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(said)) as file:
        rate, frames = file.getframerate(), bytearray(file.readframes(2**24))
    samples = torch.frombuffer(frames, dtype=torch.int16).float() / 2**15
    scaled = F.interpolate(samples[None, None], scale_factor=RATE / rate, mode="linear")
    (loud,) = (scaled[0, 0].abs() > 0.01).nonzero(as_tuple=True)
    return scaled[0, 0, loud[0] : loud[-1]]  # without the silence around it


def spectrogram(samples: Tensor) -> Tensor:
    """Samples -> the logarithm of the power in each band and frame, (BANDS, frames)."""
    window = torch.hann_window(WINDOW)
    power = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True).abs().square()
    return F.adaptive_avg_pool1d(power.T, BANDS).T.add(1e-3).log()
