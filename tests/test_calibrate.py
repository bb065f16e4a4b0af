"""The machine at hand: what it measures, what is kept, and how its GPUs are joined."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshfit import Cluster
from meshfit.anatomy.operations import MatrixProduct
from meshfit.planner.calibrate import calibrated, save
from meshfit.planner.detect import guessed, joined, profile_path
from meshfit.planner.operations import Timing
from meshfit.planner.topology import parsed

SWITCHED = """
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tNV12\tNV12\tPXB\t0-31\t0\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\t0-31\t0\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\t32-63\t1\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\t32-63\t1\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PAIRS = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-15    0
GPU1    NV4      X      SYS     SYS     0-15    0
GPU2    SYS     SYS      X      NV4     16-31   1
GPU3    SYS     SYS     NV4      X      16-31   1
"""
PCIE = """
\x1b[4m\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tPHB\t0-15\tN/A
GPU1\tPHB\t X \t0-15\tN/A
"""
MESHED = """
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\t0-19
GPU1\tNV1\t X \tNV2\tNV1\t0-19
GPU2\tNV1\tNV2\t X \tNV2\t0-19
GPU3\tNV2\tNV1\tNV2\t X \t0-19
"""


def test_a_switch_joins_all() -> None:
    found = parsed(SWITCHED)
    assert found is not None
    assert (found.gpus, found.domain, found.bandwidth, found.switched) == (4, 4, 300e9, True)
    assert found.links[0, 1] == "NV12"
    cluster = joined(Cluster.of("1x4xA100-80GB"), found)
    assert (cluster.inside.kind, cluster.inside.bandwidth, cluster.domain) == ("nvlink", 300e9, 4)


def test_bridges_join_pairs_and_the_rest_is_slow() -> None:
    found = parsed(PAIRS)
    assert found is not None
    assert found.islands == [[0, 1], [2, 3]]
    cluster = joined(Cluster.of("1x4xRTX3090"), found)
    assert cluster.domain == 2
    assert cluster.inside.kind == "nvlink"
    assert cluster.link(2).bandwidth > cluster.link(4).bandwidth
    assert cluster.link(4).kind == "pcie"


def test_without_nvlink_it_is_pcie() -> None:
    found = parsed(PCIE)
    assert found is not None
    assert (found.gpus, found.domain, found.bandwidth) == (2, 1, 0.0)
    cluster = joined(Cluster.of("1x2xA100-80GB"), found)
    assert cluster.inside.kind == "pcie"
    assert cluster.domain == 2


def test_a_mesh_of_unequal_links_adds_up() -> None:
    found = parsed(MESHED)
    assert found is not None
    assert (found.domain, found.switched, found.bandwidth) == (4, False, 4 * 25e9)


def test_what_is_no_table_is_left_out() -> None:
    assert parsed("") is None
    assert parsed("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") is None
    base = Cluster.of("8xH100")
    assert joined(base, None) == base


def test_a_cluster_is_kept_as_json(tmp_path: Path) -> None:
    for cluster in (Cluster.of("2xp5.48xlarge"), guessed(3)):
        save(cluster, tmp_path / "deep" / "one.json")
        assert Cluster.of(tmp_path / "deep" / "one.json") == cluster


def test_what_was_measured_is_what_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFIT_CACHE", str(tmp_path))
    before = Cluster.detect(2)
    found = calibrated(2)
    assert found.accelerator.rates["fp32"] > 1e8
    assert found.inside.bandwidth > 1e6
    assert found.accelerator.launch < 1e-3
    path = profile_path()
    assert path is not None
    save(found, path)
    after = Cluster.detect(2)
    assert after.accelerator.rates == found.accelerator.rates != before.accelerator.rates
    assert after.inside.bandwidth == found.inside.bandwidth
    four = Cluster.detect(4)
    assert four.accelerator.rates["fp32"] == pytest.approx(found.accelerator.rates["fp32"] / 2)
    path.write_text("like = 'nothing'")
    assert Cluster.detect(2) == before
    assert json.dumps(found.to_dict())


def test_few_rows_on_a_cpu_are_not_filled_up() -> None:
    """A microbatch of 16 rows takes a quarter of the arithmetic of one of 64, and packs as many weights."""
    device = replace(guessed(2).accelerator, launch=0.0)
    of = lambda packs, rows: Timing(replace(device, packs=packs))(MatrixProduct(rows, 1024, 256, precision="fp32"))
    assert of(0.0, 64) == pytest.approx(4 * of(0.0, 16))
    packing = 2.0 * 4 * 1024 * 256 / (device.bandwidth * device.streamed)
    assert of(2.0, 16) - of(0.0, 16) == pytest.approx(packing, rel=0.1)
    assert of(2.0, 64) < 4 * of(2.0, 16)
