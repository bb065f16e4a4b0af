"""Published trainings as the cost model takes them: a row of a table becomes a model, degrees, a cluster and software.

A row says what its source says; where it does not, what the framework of that time did. Nothing here is a number that
was fitted, and nothing depends on a row's source but its grade.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshfit.planner.cluster import Cluster
from meshfit.planner.decoder import Decoder, Degrees, Experts, Latent
from meshfit.planner.software import FSDP, JAX, MEGATRON, MEGATRON_CORE, Software

SHORT = {
    "mosaicml/llm-foundry": "llm-foundry",
    "pytorch/torchtitan": "torchtitan",
    "NVIDIA-NeMo/Megatron-Bridge": "megatron-bridge",
    "NVIDIA/dgxc-benchmarking": "dgxc",
    "MooreThreads/SimuMax": "simumax",
    "NVIDIA/Megatron-LM": "megatron-lm",
    "NVIDIA/NeMo docs long-sequence": "nemo-long",
    "yanring/Megatron-MoE-ModelZoo": "moe-zoo",
}
BEGINS = {"bigscience": "bloom", "Zero Bubble": "zero-bubble", "Korthikanti": "korthikanti", "MT-NLG": "mt-nlg"}
GRADES = {
    **dict.fromkeys(("simumax", "torchtitan", "llm-foundry", "korthikanti", "zero-bubble", "vtrain-multi"), "A"),
    **dict.fromkeys(("megatron-bridge", "bloom", "dgxc"), "B"),
}

DEVICES = {
    "A100": "A100-80GB",
    "A100 (Selene)": "A100-80GB",
    "A100-SXM-40GB?": "A100-80GB",
    "A100-SXM-40GB (DGX-A100)": "A100-40GB",
    "V100-SXM3-32GB (DGX-2)": "V100-32GB",
    "H100-SXM-96GB-HBM2e(500W)": "H100-SXM-500W",
    "H100-SXM-94/95GB-HBM2e": "H100-SXM-500W",
}
NETWORKS = {
    "1600 Gbps/node RoCE": 1600,
    "8x200Gb HDR IB (Selene)": 1600,
    "8x200Gb HDR IB": 1600,
    "Selene HDR IB": 1600,
    "Selene": 1600,
    "400 Gb/s RDMA per GPU (RoCE, Grand Teton)": 3200,
    "400 Gb/s CX-7 per GPU": 3200,
    "4x Omni-Path links per node": 400,
    "4x Omni-Path": 400,
    "800 Gbps per node (vTrain config)": 800,
    "8x50 GB/s InfiniBand": 3200,
}
"""Gbit/s of a node."""

JEAN_ZAY_NVLINK = 4 * 25e9
"""BLOOM's model card: "8 GPUs per node Using NVLink 4 inter-gpu connects, 4 OmniPath links": four links of 25 GB/s."""

SIZES = {
    "Nemotron4-15B": {"heads": 48, "kv_heads": 8, "ffn": 24576, "vocab": 256000},
    "Nemotron4-340B": {"hidden": 18432, "heads": 96, "kv_heads": 8, "ffn": 73728, "vocab": 256000},
}
"""Of models whose report (arXiv:2402.16819, 2406.11704) states what the table leaves out."""


@dataclass(frozen=True)
class Published:
    """One row: what was run and what was measured."""

    source: str
    grade: str
    family: str
    model: Decoder
    degrees: Degrees
    cluster: Cluster
    devices: int
    software: Software
    seconds: float | None
    """Of a step."""
    throughput: float | None
    """Tokens a second, all devices."""
    memory: float | None
    """Bytes."""
    memory_kind: str
    ran: bool
    recompute_known: bool
    twin: tuple
    row: dict[str, Any]

    @property
    def moe(self) -> bool:
        return self.model.experts is not None


def read(path: Path) -> tuple[list[Published], list[dict[str, Any]]]:
    """The rows that have a shape and a time or memory; and those with a shape and a time that cannot be described."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    found, left = [], []
    for row in rows:
        try:
            found.append(published(row))
        except (KeyError, TypeError, ZeroDivisionError, ValueError) as error:
            if shaped(row) and timed(row):
                left.append(row | {"why": f"{type(error).__name__}: {error}"})
    return found, left


def shaped(row: dict[str, Any]) -> bool:
    return bool(row["model"].get("layers") and row["model"].get("hidden") and row.get("group") != "layer-microbench")


def timed(row: dict[str, Any]) -> bool:
    m = row["measured"]
    return any(m.get(key) for key in ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s"))


def source_of(row: dict[str, Any]) -> str:
    name = row["source"]
    if name == "VIA-Research/vTrain":
        return row["group"]
    if name in SHORT:
        return SHORT[name]
    if "SC21" in name:
        return "sc21"
    return next(short for begins, short in BEGINS.items() if name.startswith(begins))


def family_of(framework: str) -> Software:
    text = framework.lower()
    if any(word in text for word in ("composer", "torchtitan", "zero-3")):
        return FSDP
    if "maxtext" in text or "paxml" in text:
        return JAX
    if any(word in text for word in ("megatron-core", "megatron-bridge", "nemo", "+ te")):
        return MEGATRON_CORE
    return MEGATRON


def published(row: dict[str, Any]) -> Published:
    if not shaped(row) and row["model"]["name"] not in SIZES:
        raise ValueError("no shape")
    source, software = source_of(row), family_of(row["training"]["framework"])
    model, parallel, batch, training = row["model"], row["parallel"], row["batch"], row["training"]
    family, precision = software.name, precision_of(training["precision"])
    devices = row["hardware"]["gpus"]
    decoder = decoder_of(model)
    cluster = cluster_of(row["hardware"])
    tensor, pipeline, context = (parallel.get(key) or 1 for key in ("tp", "pp", "cp"))
    data = max(1, devices // (tensor * pipeline * context))
    micro, whole = batch["micro_batch"], batch["global_batch"]
    if not micro or not whole:
        raise ValueError("no batch")
    chunks = chunks_of(parallel, decoder.layers, pipeline)
    if pipeline > 1 and data * micro == whole:  # what a device takes in a step, in microbatches that no table states
        micro = max(1, micro // (pipeline * chunks))
    core = family in ("megatron-core", "jax")
    if "no comm overlap" in training["framework"]:
        software = replace(software, hides_gradients=False, hides_tensor=False)
    if "DeepSpeed" in training["framework"] and "fp32 grad" in (training["precision"] or ""):
        # BF16_Optimizer: those of backward beside their sums; cast (2 + 4 bytes), then added (4 + 4 + 4)
        software = replace(software, gradient_bytes=6, summed_bytes=18.0)
    if "Composer" in training["framework"]:
        software = replace(software, fused_loss=True)  # llm-foundry's loss_fn: fused_crossentropy
    if training.get("compile"):
        software = replace(software, fused=0.8)
    zero = parallel.get("zero_stage")
    degrees = Degrees(
        length=model["seq_len"],
        batch=whole,
        microbatch=micro,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        context=context,
        expert=parallel.get("ep") or 1,
        zero=zero if zero is not None else 1 if core else 0,
        sequence=sequence_of(parallel, tensor, core or family == "fsdp"),
        schedule=schedule_of(parallel.get("pipeline_schedule")),
        precision=precision,
        recompute=recompute_of(training.get("activation_checkpointing"), source, core),
        attention=attention_of(training.get("attention"), family),
        ulysses=parallel.get("cp_comm") == "a2a",
        reduce_bytes=2 if precision == "fp16" or training.get("fsdp_mixed_precision_mode") == "PURE" else 4,
        logit_bytes=12.0
        if core or software.fused_loss or training.get("compile")
        else 28.0
        if family == "fsdp"
        else 36.0,
        fuses_products=bool(training.get("async_tp")),
    )
    measured = row["measured"]
    each = measured.get("tokens_per_s_per_gpu")
    throughput = measured.get("tokens_per_s") or (each * devices if each else None)
    memory = measured.get("peak_mem_gib")
    kinds = {"simumax": "allocated", "bloom": "nvidia-smi", "torchtitan": "reserved", "zero-bubble": "unknown"}
    return Published(
        source=source,
        grade=GRADES.get(source, "C"),
        family=family,
        model=decoder,
        degrees=degrees,
        cluster=cluster,
        devices=devices,
        software=software,
        seconds=measured.get("step_time_s"),
        throughput=throughput,
        memory=memory * 2**30 if memory else None,
        memory_kind=kinds.get(source, "unknown"),
        ran=measured.get("status") != "OOM",
        recompute_known=training.get("activation_checkpointing") is not None,
        twin=(decoder, degrees, cluster.accelerator.name, devices, software),
        row=row,
    )


def decoder_of(model: dict[str, Any]) -> Decoder:
    known: dict[str, Any] = model | {
        key: value for key, value in SIZES.get(model["name"], {}).items() if not model.get(key)
    }
    arch, moe, name = (known["arch"] or "").lower(), known.get("moe"), known["name"].lower()
    gated = "llama" in arch or "gqa" in arch or "mla" in arch
    plain = gated or "nemotron" in arch or "mpt" in arch
    experts = None
    if moe:
        said = re.search(r"dense_layers=(\d+)|(\d+) dense layers", arch)
        first = int(said[1] or said[2]) if said else 1 if "mla" in arch else 0
        experts = Experts(
            count=moe["experts"],
            chosen=moe["topk"],
            ffn=moe["expert_ffn"],
            shared=moe.get("shared_ffn") or 0,
            dense_layers=first if known["layers"] > first else 0,
        )
    vocab = known.get("vocab") or (151936 if "qwen" in name else 163840 if "kimi" in name else 51200)
    return Decoder(
        layers=known["layers"],
        hidden=known["hidden"],
        heads=known["heads"],
        kv_heads=known["kv_heads"] or known["heads"],
        head_width=128 if "head_dim128" in arch else 0,
        ffn=known["ffn"],
        vocab=-(-vocab // 128) * 128,
        gated=gated,
        bias=not plain,
        dropout=not plain,
        rotary=gated or "nemotron" in arch,
        tied=bool(known["tied_embeddings"]) if known["tied_embeddings"] is not None else not plain,
        latent=Latent() if "mla" in arch else None,
        experts=experts,
    )


def cluster_of(hardware: dict[str, Any]) -> Cluster:
    name = DEVICES.get(hardware["gpu"], hardware["gpu"])
    devices, per_node = hardware["gpus"], hardware["gpus_per_node"] or 8
    each = min(devices, per_node)
    network = NETWORKS.get(hardware.get("inter_node") or "")
    text = f"{-(-devices // each)}x{each}x{name}"
    found = Cluster.of(text + (f"@{network * each / per_node}Gbps" if network else ""))
    if "Omni-Path" in (hardware.get("inter_node") or ""):
        return replace(found, inside=replace(found.inside, bandwidth=JEAN_ZAY_NVLINK))
    return found


def precision_of(text: str | None) -> str:
    text = (text or "bf16").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text:
        return "fp8"
    return "bf16" if "bf16" in text else "fp16"


def chunks_of(parallel: dict[str, Any], layers: int, pipeline: int) -> int:
    if pipeline == 1:
        return 1
    schedule = (parallel.get("pipeline_schedule") or "").lower()
    if schedule == "1f1b-i":  # "as many chunks as there are layers"
        return max(1, (layers + 2) // pipeline)
    return parallel.get("vp") or (2 if "interleaved" in schedule else 1)


def sequence_of(parallel: dict[str, Any], tensor: int, usual: bool) -> bool:
    said = parallel.get("sequence_parallel")
    return tensor > 1 and (usual if said is None else bool(said))


def schedule_of(text: str | None) -> str:
    return {"zb-1p": "zb1p", "zb-2p": "zb2p"}.get((text or "").lower(), "1f1b")


def recompute_of(text: str | None, source: str, core: bool) -> str:
    text = (text or "").lower()
    if not text:
        return "full" if source == "mt-nlg" else "none"
    if text.startswith("full"):
        return "full"
    if "attention" in text:
        return "attention"
    if "selective layer" in text and "norm" not in text:
        return "half"
    return "operations" if "op" in text or "config default" in text else "none"


def attention_of(text: str | None, family: str) -> str:
    text = (text or "").lower()
    if "unfused" in text or (not text and family == "megatron"):
        return "unfused"
    if family in ("megatron-core", "jax"):
        return "cudnn"
    return "flash2" if "sdpa" in text or not text else "flash1"
