"""A recogniser in the manner of DeepSpeech2: convolutions, recurrent layers and CTC.

    torchrun --standalone --nproc-per-node 2 examples/deepspeech.py --strategy full_shard

It transcribes one to four spoken numbers in letters. Speech is synthesised (speech.py):
each letter by two tones, or words by espeak-ng with SPEECH=espeak-ng in the environment, which
takes more steps than the default. Held-out speech has its own voices.
"""

import common
import speech
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = 0.2  # wrong characters per character of held-out speech; an empty transcript: 1
LETTERS = " abcdefghijklmnopqrstuvwxyz"  # 0 is CTC's blank, so that letters begin at 1
BATCH = 16  # utterances per rank
JUDGED = 64  # held-out utterances per rank


class DeepSpeech(nn.Module):
    """Spectrograms (B, BANDS, T) -> logarithms of chances (T / 2, B, 28) of blank and letters."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.listen = nn.Sequential(
            nn.Conv2d(1, channels, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, 5, stride=(2, 1), padding=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        bands = speech.BANDS // 4 * channels
        self.recur = nn.GRU(bands, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 1 + len(LETTERS), bias=False)

    def forward(self, spectrograms: Tensor) -> Tensor:
        heard = self.listen(spectrograms[:, None])  # (B, channels, BANDS / 4, T / 2)
        states, _ = self.recur(heard.flatten(1, 2).transpose(1, 2))
        return self.head(states).log_softmax(-1).transpose(0, 1)


class Utterances:
    """Spoken numbers in some voices; each call draws a batch."""

    def __init__(self, by: str, voices: list[speech.Voice]) -> None:
        self.voices, self.words = voices, speech.spoken(by, voices)

    def one(self) -> tuple[Tensor, str]:
        """A spectrogram (BANDS, T) of one to four numbers in one voice, and their text."""
        (count,), (voice,) = torch.randint(1, 5, (1,)), torch.randint(len(self.voices), (1,))
        said = [speech.WORDS[i] for i in torch.randint(len(speech.WORDS), (int(count),))]
        pause = torch.zeros(speech.RATE // 20)
        sounds = [part for word in said for part in (self.words[word, self.voices[voice]], pause)]
        samples = torch.cat([pause, *sounds])
        return speech.spectrogram(samples + 0.02 * torch.randn_like(samples)), " ".join(said)

    def batch(self, size: int) -> tuple[Tensor, Tensor, list[str]]:
        """Spectrograms (B, BANDS, T), how many output frames each has, and texts."""
        sounds, texts = zip(*(self.one() for _ in range(size)), strict=True)
        frames = torch.tensor([sound.shape[1] for sound in sounds])
        padded = [F.pad(sound, (0, int(frames.max()) - sound.shape[1])) for sound in sounds]
        return torch.stack(padded), (frames + 1) // 2, list(texts)


def ctc(logs: Tensor, frames: Tensor, texts: list[str]) -> Tensor:
    letters = [LETTERS.index(letter) + 1 for text in texts for letter in text]
    lengths = torch.tensor([len(text) for text in texts])
    return F.ctc_loss(logs, torch.tensor(letters), frames, lengths, zero_infinity=True)


def transcripts(logs: Tensor, frames: Tensor) -> list[str]:
    """The likeliest letter of each frame, without repetitions and blanks."""
    texts = []
    for row, count in zip(logs.argmax(-1).T, frames, strict=True):
        letters = row[:count].unique_consecutive()
        texts.append("".join(LETTERS[i - 1] for i in letters[letters > 0]))
    return texts


def mistakes(guess: str, text: str) -> int:
    """The edit distance: letters to insert, delete or replace."""
    row = list(range(len(text) + 1))
    for i, letter in enumerate(guess):
        above, row = row, [i + 1]
        for j, right in enumerate(text):
            row.append(min(above[j] + (letter != right), above[j + 1] + 1, row[j] + 1))
    return row[-1]


def train(run: common.Run) -> None:
    by = speech.synthesizer()
    utterances, held_out = Utterances(by, speech.VOICES), Utterances(by, speech.HELD_OUT)
    model = run.wrap(DeepSpeech(8, 32) if run.quick else DeepSpeech(16, 96))
    judged = held_out.batch(8 if run.quick else JUDGED)
    optimizer = run.optimizer("AdamW", model, lr=2e-3, weight_decay=1e-2)

    for _ in run.steps(model, optimizer):
        spectrograms, frames, texts = utterances.batch(4 if run.quick else BATCH)
        optimizer.zero_grad()
        loss = ctc(model(spectrograms), frames, texts)
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    spectrograms, frames, texts = judged
    with torch.no_grad():
        guesses = transcripts(model(spectrograms), frames)
    wrong = sum(map(mistakes, guesses, texts)) / sum(map(len, texts))

    def draw(axes) -> None:
        axes.imshow(spectrograms[0, :, : 2 * frames[0]], origin="lower", aspect="auto")
        axes.set(xlabel=f"spoken ({by}): {texts[0]}\nwritten: {guesses[0]}", ylabel="band")

    baseline = ("an empty transcript", 1.0)
    what = "held-out character error"
    run.result(what, wrong, expected=EXPECTED, baseline=baseline, draw=draw)


if __name__ == "__main__":
    common.main(__doc__, train, steps=250)
