"""What each strategy is, in words. What it did and what it cost is measured by make.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import placement
from models import GPT_, MIXTURE, TOWERS, Shown


@dataclass(frozen=True, kw_only=True)
class Strategy:
    file: str
    name: str
    plan: str
    does: str
    """In three sentences."""
    look: str
    """What the picture shows."""
    choose: str
    more: str
    """The page that has the rest, under docs/."""
    model: Shown = GPT_
    fill: placement.Fill = placement.whole
    """What a device holds of each block."""
    samples: Callable[[int, int], tuple[float, float, str]] = lambda rank, ranks: (0.0, 1.0, "12 of 12")
    """What a device works on: from where to where in the batch, and in words."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """What each collective carries."""
    gaps: tuple[tuple[str, ...], ...] = ()
    """Which of them go between a device and the next, as drawn; empty: all of them."""
    beside: str = ""
    """Another plan, whose steps are drawn below."""
    steps: int = 2
    """In the picture."""


def shared(rank: int, ranks: int) -> tuple[float, float, str]:
    """Each device has its part of the batch."""
    return rank / ranks, (rank + 1) / ranks, f"{12 // ranks} of 12"


STRATEGIES = (
    Strategy(
        file="all-reduce",
        name="All-reduce",
        plan="data=2",
        does="Every device holds the whole model and takes its share of each batch. Gradients are summed over "
        "all of them while backward goes on, bucket by bucket. Then every device makes the same step, so "
        "all stay alike.",
        look="Both ranks do the same thing on other samples. The line below a lane is traffic under way: it "
        "begins before backward ends. What is left of it when backward is done is waited for, in red.",
        choose="The model, its gradients and its optimizer fit on one device, and the links are fast. Begin here.",
        more="exchange.md",
        samples=shared,
        moved={"all_reduce": "gradients, summed"},
    ),
    Strategy(
        file="model-server",
        name="Model server",
        plan="server=1 data=2",
        does="A process on the host owns weights and optimizer. Workers send it their gradients, it adds them, "
        "steps once for all and hands out new weights. In step this is the step of one device; "
        "`staleness=4` lets workers run ahead.",
        look="The third lane is the server: it works while the workers wait, and rests while they compute.",
        choose="The optimizer's state fits on the host and not on the devices; or workers differ in speed, or "
        "come and go.",
        more="exchange.md",
        samples=shared,
        moved={"push": "gradients up", "pull": "weights down"},
        gaps=(("push", "pull"),) * 2,
        beside="server=1 data=2 staleness=4",
    ),
    Strategy(
        file="local-steps",
        name="Local steps",
        plan="data=2 exchange=local every=4",
        does="Every device steps its own optimizer on its own samples. Every few steps the weights of all are "
        "averaged, or, with `exchange=diloco`, moved by an outer optimizer. It is not the training of one "
        "device, and costs some loss for much less traffic.",
        look="Weights travel once in four steps; in the others nobody waits for anybody.",
        choose="The link is slow: over a network that all-reduce would wait for in every step.",
        more="exchange.md",
        samples=shared,
        moved={"all_reduce": "weights, every 4th step"},
        steps=4,
    ),
    Strategy(
        file="sharded",
        name="Sharded",
        plan="shard=2",
        does="Each device keeps a part of every weight, gradient and optimizer state, and takes its share of "
        "each batch. A block's weights are gathered just before they are needed, and dropped after. "
        "Gradients go back to the owners of each part, summed.",
        look="Forward and backward are cut by gathering; the line below backward is gradients on their way to "
        "their owners. The optimizer steps half as much on each rank.",
        choose="The model would fit on one device, but not with gradients and optimizer beside it: ZeRO, for any "
        "module.",
        more="layout.md",
        fill=placement.slices,
        samples=shared,
        moved={"all_gather": "weights, gathered", "reduce_scatter": "gradients, summed"},
    ),
    Strategy(
        file="model",
        name="Model parallelism",
        plan="pipeline=2 schedule=sequential microbatches=2",
        does="Layers lie on devices, one part after another. A microbatch goes forward through all of them and "
        "back, then the next one does. One device works at a time: this is what a pipeline mends.",
        look="Dashed lines are what is handed from stage to stage: activations forward, gradients backward. "
        "Wherever one rank works the other is idle.",
        choose="Hardly ever: it is here to compare with. It needs the least memory for activations of all pipelines.",
        more="schedule.md",
        fill=placement.layers,
        moved={"send": "activations and back"},
    ),
    Strategy(
        file="pipeline",
        name="Pipeline",
        plan="pipeline=2 microbatches=6",
        does="Layers lie on devices, and the batch is cut into microbatches that follow each other through "
        "them. While one device is at one microbatch, the next device is at the one before. With `1f1b` a "
        "device alternates between forward and backward, and keeps few microbatches.",
        look="The numbers are microbatches. The idle corners at both ends of a step are the bubble, (p - 1) / "
        "(m + p - 1) of the time for p stages and m microbatches.",
        choose="The model does not fit on one device, and links are slow: only activations at the cuts travel.",
        more="schedule.md",
        fill=placement.layers,
        moved={"send": "activations and back"},
    ),
    Strategy(
        file="tensor",
        name="Tensor parallelism",
        plan="tensor=2",
        does="Every operation is shared: each device holds some of the heads and channels of every block. All "
        "work on the same samples. Twice a block, forward and backward, what they made is summed over "
        "them.",
        look="Both ranks are at the same samples at once. Orange is where they meet: nothing can go on before "
        "the sum is there.",
        choose="Layers are wide, and the links between devices very fast: within one machine.",
        more="layout.md",
        fill=placement.columns,
        moved={"all_reduce": "activations, summed", "all_gather": "parts, put together"},
        steps=1,
    ),
    Strategy(
        file="branch",
        name="Branch parallelism",
        plan="branch=2",
        does="Parts of the model that do not need each other lie on devices of their own, and run at the same "
        "time. Results meet where the model joins them. All work on the same samples.",
        look="Green is a tower of the rank's own: first forward, then, longer, backward. At its end the ranks "
        "hand each other what they made.",
        choose="The model has towers, arms, several decoders, members of an ensemble.",
        more="branch.md",
        fill=placement.layers,
        moved={"broadcast": "ends of towers"},
        model=TOWERS,
    ),
    Strategy(
        file="context",
        name="Context parallelism",
        plan="context=2",
        does="Every sequence is cut over the devices: each has some of its positions, and all weights. "
        "Attention needs the keys and values of all positions: they are gathered, or, as here, each device has some "
        "of the heads for all of them while it attends. The rest needs nobody. Gradients are summed as under "
        "all-reduce.",
        look="Orange is what attention needs of the others being exchanged, or its gradients going back.",
        choose="Sequences are so long that the activations of one sample fill a device.",
        more="context.md",
        samples=lambda rank, ranks: (rank / ranks, (rank + 1) / ranks, "half each"),
        moved={"all_to_all": "heads for positions", "all_reduce": "gradients, summed"},
        steps=1,
    ),
    Strategy(
        file="expert",
        name="Expert parallelism",
        plan="expert=2",
        does="The experts of a mixture are spread over the devices, the rest is on each. Each device takes its "
        "share of the batch; a token travels to the device of the expert that its router chose, and back. "
        "Experts' gradients are complete where they live.",
        look="Orange is tokens on their way to experts and back. How long a rank is at it depends on what the "
        "routers chose.",
        choose="Most of the weights are in experts.",
        more="expert.md",
        fill=placement.experts,
        samples=shared,
        moved={"all_to_all": "tokens to experts", "all_reduce": "gradients, summed"},
        model=MIXTURE,
        steps=1,
    ),
    Strategy(
        file="combined",
        name="Combinations",
        plan="data=2 pipeline=2 microbatches=4",
        does="Words combine: here two copies of a pipeline of two stages. Each copy takes half of each batch; "
        "ranks that hold the same stage sum their gradients. The mesh goes from the slowest links, "
        "outside, to the fastest, inside.",
        look="Ranks 0 and 1 are the first stage of both copies, 2 and 3 the second. Handing on is within a "
        "copy, and the sum at the end of a step within a stage.",
        choose="One word does not make it fit: tensor within a machine, pipeline or shard over machines, data "
        "around it.",
        more="plan.md",
        fill=placement.copies_of_layers,
        samples=lambda rank, ranks: (rank % 2 / 2, (rank % 2 + 1) / 2, "6 of 12"),
        moved={"send": "activations and back", "all_reduce": "gradients, summed"},
        gaps=(("all_reduce",), ("send",), ("all_reduce",)),
    ),
)
