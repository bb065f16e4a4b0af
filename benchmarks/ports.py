"""Scripts of other libraries and the same with meshfit: lines, and whether losses and metrics are the same.

    python benchmarks/ports.py
    python benchmarks/ports.py lightning        # one of them

Runs each script of ``examples/ports`` as it is, then meshfit's on one device and under three plans. A script's last
line has its numbers: loss of the last step, loss and accuracy on the validation data. Data is read in order: shuffled
orders are each library's own.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "ports"
PORTS = {
    "accelerate": ("accelerate_digits.py", {"meshfit.fit": "meshfit_digits.py"}),
    "lightning": ("lightning_digits.py", {"meshfit.lightning": "lightning_meshfit.py"}),
    "hf": ("hf_bert.py", {"meshfit.hf": "hf_meshfit.py", "meshfit.fit": "meshfit_bert.py"}),
}
PLANS = ("data=1", "data=2", "shard=2", "pipeline=2")
LIMIT = 1e-4  # relative: sums in another order
EACH = "per_device_train_batch_size"


def lines(script: str) -> list[str]:
    """Without what is blank, and the docstring."""
    text = re.sub(r'^"""[^"]*"""', "", (FOLDER / script).read_text())
    return [line for line in text.splitlines() if line.strip()]


def changed(before: str, after: str) -> int:
    """Lines of ``after`` that are new or changed."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(lines(before), lines(after)))


def numbers(script: str, plan: str | None = None) -> list[float]:
    """What the script prints at its end, under ``plan``."""
    text = (FOLDER / script).read_text()
    if plan is not None:
        assert 'plan="data=2"' in text
        text = text.replace('plan="data=2"', f'plan="{plan}"')
        if plan.startswith(("data=2", "shard=2")):  # Hugging Face's batch size is that of each device
            text = re.sub(rf"{EACH}=(\d+)", lambda found: f"{EACH}={int(found[1]) // 2}", text)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / script).write_text(text)
        done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=600)
    last = [line for line in done.stdout.splitlines() if line.strip().startswith("loss ")]
    if done.returncode or not last:
        raise SystemExit(f"{script} {plan or ''}: {done.stderr[-2000:]}")
    return [float(number) for number in last[-1].split()[1::2]]


def main(asked: list[str]) -> None:
    failed = False
    for name in asked or PORTS:
        before, afters = PORTS[name]
        want = numbers(before)
        print(f"{before}: {len(lines(before))} lines; loss {want[0]}, valid {want[1]}, accuracy {want[2]}", flush=True)
        for verb, after in afters.items():
            told = f"{changed(before, after)} lines changed or new" if verb != "meshfit.fit" else "by itself"
            print(f"  {after} ({verb}): {len(lines(after))} lines, {told}", flush=True)
            for plan in PLANS:
                got = numbers(after, plan)
                apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(got, want, strict=True))
                failed |= apart > LIMIT
                word = "the same" if apart <= LIMIT else "DIFFERENT"
                print(f"    {plan:<11} loss {got[0]}, valid {got[1]}, accuracy {got[2]}: {word}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
