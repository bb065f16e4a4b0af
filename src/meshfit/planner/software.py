"""What is known of the software that runs a plan: facts of how it works, and at most three measured constants.

The facts say which kernels it calls and which collectives it starts beside computing; they are documented by the
projects themselves. The constants say what no datasheet does:

    slack     seconds that pass, over those that kernels and links account for
    host      seconds that the host takes for each kernel that is counted here: small models wait for it. What is not
              counted (views, bookkeeping, Python between kernels) is in it
    exposed   share of the collectives that run beside computing which is waited for all the same

Those of the families below are what ``benchmarks/plan_published.py`` finds with all sources known; a family that is not
among them has the defaults of ``Software``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Software:
    """A family of frameworks."""

    name: str
    slack: float = 1.08
    host: float = 8e-6
    exposed: float = 0.15

    hides_gradients: bool = True
    """Sums gradients over replicas while backward runs."""

    hides_tensor: bool = False
    """Runs the collectives of tensor parallelism beside the products they belong to."""

    blocks_sends: bool = False
    """Ranks of a pipeline wait for what they send and receive; otherwise it only delays the next stage."""

    fused: float = 1.0
    """Passes over memory of its element-wise work, over those of kernels fused where Megatron fuses them."""

    master: bool = True
    """Keeps weights in 16 bits beside those in fp32 that the optimizer steps."""

    fp32_gradients: bool = True
    """Sums gradients over microbatches in fp32."""

    summed_bytes: float = 0.0
    """Read and written for each gradient of a microbatch to add it to its sum, where kernels of their own do so; 0: the
    product that makes it adds it."""

    gradient_bytes: int = 4
    """Of a gradient, where it is kept."""

    spare_gradients: bool = False
    """Allocates gradients of a layer's weights in 16 bits that fused kernels leave unused (Transformer Engine)."""

    fused_loss: bool = False
    """One kernel makes loss and gradient of the logits in their place."""

    passes: float = 34.0
    """Bytes that the optimizer reads and writes a parameter: Adam in one kernel, weights and moments in fp32."""


MEGATRON = Software("megatron", slack=1.05, host=50e-6, exposed=0.0, hides_gradients=False, blocks_sends=True)
"""Megatron-LM and its forks before Transformer Engine: gradients are summed when backward is done."""

MEGATRON_CORE = Software(
    "megatron-core", slack=1.04, host=2e-6, hides_tensor=True, spare_gradients=True, fused_loss=True
)
"""With Transformer Engine; collectives of all axes beside computing, unless a plan says otherwise."""

FSDP = Software("fsdp", slack=1.10, host=2e-6, exposed=0.3, fused=1.5, master=False, fp32_gradients=False, passes=40.0)
"""PyTorch's FSDP, eager: parameters gathered and gradients scattered a block at a time, beside computing."""

JAX = Software("jax", slack=1.18, host=2e-6, exposed=0.3, hides_tensor=True)
"""XLA: collectives beside computing as its scheduler places them."""

MESHFIT = Software("meshfit", master=False, passes=40.0)
"""Eager: weights in fp32 that the optimizer steps in place, gradients beside backward. Its constants are
the defaults: no training of it over several GPUs has been timed yet."""

FAMILIES = {family.name: family for family in (MEGATRON, MEGATRON_CORE, FSDP, JAX)}
