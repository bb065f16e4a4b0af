"""Under torchrun a model given as a function is nowhere whole: not at the start, and at the end only if asked for."""

from pathlib import Path

import pytest
import torch

from tests import command

SCRIPT = """
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.errors import JobError

rank = int(os.environ.get("RANK", 0))
folder = sys.argv[1]
generator = torch.Generator().manual_seed(0)
x, y = torch.randint(32, (22, 6), generator=generator), torch.randint(3, (22,), generator=generator)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3)))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(32, 3)
        self.register_buffer("scale", torch.linspace(1, 2, 32))
        self.register_buffer("extra", torch.ones(3), persistent=False)
        if rank:
            nn.init.zeros_(self.out.weight)  # every rank builds other weights: the first rank's count

    def forward(self, x):
        return self.out(self.head(self.norm(self.blocks(self.embed(x)).mean(1))) * self.scale) * self.extra


found = {}
for plan in sys.argv[2:]:
    sgd = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
    out = os.path.join(folder, plan.replace(" ", "-"))
    result = meshfit.fit(Net, (x, y), loss=F.cross_entropy, optimizer=sgd, steps=4, batch_size=8, plan=plan,
                         devices="cpu", out=out, checkpoint=2, progress=False)
    try:
        parts = bool(result.model) and False
    except JobError:
        parts = True
    result.save(os.path.join(folder, "saved", plan), shard=3000)
    model = result.gather_model()
    assert result.model is model and model.head.weight is model.embed.weight
    found[plan] = [step.loss for step in result.history], model.state_dict(), parts, result.notes, model(x)
torch.save(found, os.path.join(folder, f"{rank}.pt"))
"""
PLANS = ("data=2", "shard=2", "tensor=2", "pipeline=2", "shard=2 zero=1")


def run(folder: Path, plans: tuple[str, ...], *before: str) -> dict:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = command.run(*before, script, folder, *plans, folder=folder, timeout=400, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "0.pt")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, dict, Path]:
    folder = tmp_path_factory.mktemp("function")
    alone = run(folder / "alone", ("data=1",))
    first = run(folder / "spread", PLANS, *command.TORCHRUN)
    return alone["data=1"], first, torch.load(folder / "spread" / "1.pt"), folder / "spread"


@pytest.mark.parametrize("plan", PLANS)
def test_parts_are_put_together_when_asked(worlds: tuple[dict, dict, dict, Path], plan: str) -> None:
    from safetensors.torch import load_file

    alone, first, second, folder = worlds
    losses, weights, _, _, outputs = alone
    for found in (first, second):
        got, state, parts, notes, made = found[plan]
        assert got == pytest.approx(losses, rel=1e-4)
        assert parts == (plan != "data=2")
        assert not [note for note in notes if note.startswith("model:")]
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made, outputs, rtol=1e-3, atol=1e-4)
    out = folder / plan.replace(" ", "-")
    saved = load_file(out / "weights.safetensors")
    assert saved.keys() == weights.keys() - {"head.weight"}
    assert all(torch.equal(saved[name], first[plan][1][name]) for name in saved)
    assert (out / "report.html").exists()
    files = sorted((folder / "saved" / plan).glob("model-*.safetensors"))
    assert len(files) > 1
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)
