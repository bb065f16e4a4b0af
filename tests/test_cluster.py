"""Clusters: how they are written, what is refused, which link joins whom."""

import json
from pathlib import Path

import pytest
import torch

from meshfit import Cluster, PlanError
from meshfit.planner.accelerators import ACCELERATORS, ALIASES, GIB
from meshfit.planner.detect import like
from meshfit.planner.names import NODES, USUAL, speed


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("8xH100", 1, 8, "H100-SXM"),
        ("H100", 1, 1, "H100-SXM"),
        ("64xh100", 8, 8, "H100-SXM"),
        ("4x8xA100-80GB@400Gbps", 4, 8, "A100-80GB"),
        ("2x4xRTX4090", 2, 4, "RTX4090"),
        ("2xp5.48xlarge", 2, 8, "H100-SXM"),
        ("16xDGX-A100", 16, 8, "A100-80GB"),
        ("64xGB200", 16, 4, "GB200"),
    ],
)
def test_a_line_of_text(text: str, nodes: int, devices: int, name: str) -> None:
    found = Cluster.of(text)
    assert (found.nodes, found.devices_per_node, found.accelerator.name) == (nodes, devices, name)
    assert found.devices == nodes * devices
    assert Cluster.of(json.loads(json.dumps(found.to_dict()))) == found
    assert str(found.devices) in str(found)


def test_networks_are_of_a_node_and_links_of_a_device() -> None:
    slow, fast = Cluster.of("4x8xA100-80GB@400Gbps"), Cluster.of("4x8xA100-80GB@8x200Gbps")
    assert slow.network.bandwidth == 400e9 / 8 / 8
    assert fast.network.bandwidth == 200e9 / 8 == Cluster.of("32xA100").network.bandwidth
    assert fast.inside.bandwidth == 300e9
    assert speed("50GB/s") == 50e9 == speed("400Gbps") == speed("2x200 gbps") == speed("0.4Tbps")


def test_which_link_joins_a_group() -> None:
    dgx, rack = Cluster.of("4x8xH100"), Cluster.of("288xGB200")
    assert dgx.link(8).kind == "nvlink"
    assert dgx.link(2, stride=8).kind == "network"
    assert dgx.tiers(32) == (8, 4)
    assert dgx.tiers(4, stride=2) == (4, 1)
    assert dgx.tiers(4, stride=8) == (1, 4)
    assert dgx.tiers(12) == (6, 2)
    assert rack.link(64).kind == "nvlink"
    assert rack.tiers(288) == (72, 4)
    assert Cluster.of("2xL4").inside.kind == "pcie"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH10", "did you mean H100?"),
        ("3xp5.48xlarg", "did you mean p5.48xlarge?"),
        ("quantum", "others can be described in a file"),
        ("4x8xA100@fast", "'fast' is no speed"),
        ("12xH100", "8 or 16 would"),
        ("2x8xp5.48xlarge", "is a machine of 8 devices"),
        ("0xH100", "has no device"),
        ("nowhere.toml", "there is no file"),
    ],
)
def test_what_is_unknown_is_said(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        Cluster.of(text)
    assert said in str(error.value)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('like = "4x8xH100"\nprice = 20.0\nnetwork = "8x100Gbps"\n[accelerator]\nwatts = 350\n')
    found = Cluster.of(path)
    assert (found.name, found.nodes, found.hourly, found.accelerator.watts) == ("ours", 4, 80.0, 350)
    assert found.network.bandwidth == 100e9 / 8, "of a node, as in a line of text"
    assert Cluster.of(str(path)) == found
    path.write_text('like = "4x8xH100"\ndevices_per_node = 4\n')
    halves = Cluster.of(path)
    assert (halves.devices, halves.domain, halves.link(8).kind) == (16, 4, "network"), "NVLink ends with the node"
    assert halves.network.bandwidth == 2 * Cluster.of("4x8xH100").network.bandwidth, "half as many share it"
    path.write_text('accelerator = "L4"\nnodes = 2\n[network]\nbandwidth = 5e9\n')
    assert (Cluster.of(path).accelerator.name, Cluster.of(path).network.bandwidth) == ("L4", 5e9)
    for text, said in (
        ("nodes = 2", "says what its devices are"),
        ('like = "8xH100"\nnode = 2', "did you mean nodes?"),
        ('like = "8xH100"\n[network]\nbandwith = 1', "did you mean bandwidth?"),
        ("nodes = ", "cannot be read"),
        ('[accelerator]\nname = "ours"\nmemory = 1', "lacks bandwidth, rates, units"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=said.replace("?", r"\?")):
            Cluster.of(path)


def test_every_name_is_of_something() -> None:
    for name in (*ACCELERATORS, *ALIASES, *NODES):
        found = Cluster.of(name)
        device = found.accelerator
        assert device.memory >= 16 * GIB
        assert device.rate("fp8") >= device.rate("fp16") >= device.rate("fp32") > 0, "a wider one stands in"
        assert all(0 < share < 1 for share in device.reached.values())
        assert device.sustained("fp16") < device.rate("fp16")
        assert (found.price is None) == (not found.price_source)
    assert USUAL.keys() <= ACCELERATORS.keys()


def test_this_machine() -> None:
    here = Cluster.detect(None if torch.cuda.is_available() else 2)
    assert here.nodes == 1
    assert here.accelerator.memory > 2**28
    if not torch.cuda.is_available():
        assert here.devices == 2
    assert like("NVIDIA A100-SXM4-40GB", 39 * GIB) == "A100-40GB"
    assert like("NVIDIA A100 80GB PCIe", 79 * GIB) == "A100-PCIe"
    assert like("NVIDIA H100 80GB HBM3", 79 * GIB) == "H100-SXM"
    assert like("NVIDIA GeForce RTX 4090", 24 * GIB) == "RTX4090"
    assert like("NVIDIA A10G", 22 * GIB) == "A10G"
    assert like("NVIDIA H200", 140 * GIB) == "H200"
