"""How long does the search for a plan take, after the sizes of the model are known?

    python benchmarks/plan_search.py

Seconds that pass, and seconds of a core: on a machine that others use the first say little.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshfit import Cluster
from meshfit.planner.decoder import Decoder
from meshfit.planner.search import search
from meshfit.planner.sizes import DecoderPredictor

LLAMA = replace(
    Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    **dict.fromkeys(("gated", "rotary"), True),
    **dict.fromkeys(("bias", "dropout", "tied"), False),
)
CASES = (
    ("70B", LLAMA, "1024xH100", 1024, 2.0),
    ("405B", replace(LLAMA, layers=126, hidden=16384, heads=128, ffn=53248), "16384xH100", 2048, 10.0),
)


def main() -> None:
    print(
        f"{'':6}{'cluster':>12}{'plans':>8}{'fit':>7}{'simulated':>11}{'passed':>9}{'of a core':>11}{'goal':>7}  best"
    )
    for name, model, on, batch, goal in CASES:
        predictor = DecoderPredictor(model, Cluster.of(on), 8192)
        began = time.process_time()
        found = search(predictor, batch)
        took = time.process_time() - began
        counts = f"{found.written:>8}{found.fitting:>7}{found.priced:>11}"
        plan = "nothing fits" if found.best is None else str(found.best.plan)
        print(f"{name:6}{on:>12}{counts}{found.seconds:>7.1f} s{took:>9.1f} s{goal:>5.0f} s  {plan}")


if __name__ == "__main__":
    main()
