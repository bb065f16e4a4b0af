"""Speech recognition with CTC: which keys of a telephone were pressed? Recordings and numbers of any length.

python examples/speech.py --plan shard=2
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import meshfit

KEYS = "123456789*0#"
RATE, FRAME = 4000, 128  # samples a second, samples between two columns of the spectrogram


def press(key: int, seconds: float) -> Tensor:
    """Each key is two tones: one of its row, one of its column."""
    time = torch.arange(int(RATE * seconds)) / RATE
    row, column = (697, 770, 852, 941)[key // 3], (1209, 1336, 1477)[key % 3]
    return torch.sin(2 * torch.pi * row * time) + torch.sin(2 * torch.pi * column * time)


def recordings(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Three to eight keys, pressed for 0.06 to 0.2 s each, in noise as loud as they are; and which they were."""
    draw, samples = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        keys = torch.randint(12, (int(torch.randint(3, 9, (), generator=draw)),), generator=draw)
        lengths = 0.06 + 0.14 * torch.rand(len(keys), 2, generator=draw)
        parts = [
            part
            for key, (tone, pause) in zip(keys.tolist(), lengths.tolist(), strict=True)
            for part in (press(key, tone), torch.zeros(int(RATE * pause)))
        ]
        wave = torch.cat(parts)
        samples.append((wave + torch.randn(len(wave), generator=draw), keys + 1))  # 0 is CTC's blank
    return samples


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Waves padded with silence, their true lengths, and the keys."""
    waves, keys = ([sample[i] for sample in samples] for i in (0, 1))
    frames = torch.tensor([len(wave) // FRAME for wave in waves])
    said = {"keys": pad_sequence(keys, batch_first=True), "count": torch.tensor([len(each) for each in keys])}
    return pad_sequence(waves, batch_first=True), frames, {**said, "frames": frames}


class Recogniser(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.register_buffer("window", torch.hann_window(2 * FRAME))
        self.conv = nn.Conv1d(FRAME + 1, width, 3, padding=1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(KEYS) + 1)

    def forward(self, waves: Tensor, frames: Tensor) -> Tensor:
        spectrum = torch.stft(waves, 2 * FRAME, FRAME, window=self.window, return_complex=True).abs()
        hidden = F.relu(self.conv(spectrum.log1p())).transpose(1, 2)
        silent = torch.arange(hidden.shape[1], device=frames.device) >= frames[:, None]
        return self.head(self.encoder(hidden, src_key_padding_mask=silent))


def loss(outputs: Tensor, said: dict[str, Tensor]) -> Tensor:
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), said["keys"], said["frames"], said["count"])


def heard(outputs: Tensor, frames: Tensor) -> list[list[int]]:
    """The likeliest class of each frame, repeats and blanks left out."""
    best = [row[:count].tolist() for row, count in zip(outputs.argmax(-1), frames.tolist(), strict=True)]
    return [[a for a, b in zip(row, [0, *row], strict=False) if a not in (0, b)] for row in best]


def numbers_right(outputs: Tensor, said: dict[str, Tensor]) -> Tensor:
    pairs = zip(heard(outputs, said["frames"]), said["keys"].tolist(), said["count"].tolist(), strict=True)
    return torch.tensor([float(row == keys[:count]) for row, keys, count in pairs])


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    return meshfit.fit(
        Recogniser,
        recordings(1500, seed=0),
        collate=collate,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
        clip=1.0,
        batch_size=32,
        epochs=10,
        valid=recordings(200, seed=1),
        metrics={"numbers_right": numbers_right},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("whole numbers right by epoch:", *(f"{s.valid['numbers_right']:.1%}" for s in result.history if s.valid))
    waves, frames, said = collate(recordings(3, seed=2))
    for row, keys in zip(heard(result.model.cpu().eval()(waves, frames), frames), said["keys"].tolist(), strict=True):
        print("pressed", "".join(KEYS[key - 1] for key in keys if key), " heard", "".join(KEYS[key - 1] for key in row))
