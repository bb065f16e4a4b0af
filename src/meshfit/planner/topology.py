"""How the GPUs of a machine are joined, as ``nvidia-smi topo -m`` prints it.

NV18           NVLink, eighteen lanes
PIX, PXB       PCIe, through one switch or several
PHB, NODE      PCIe, through the host's bridge
SYS            PCIe and the link between sockets
"""

import re
import subprocess
from dataclasses import dataclass

LANE = 25e9
"""Bytes/s of a lane of NVLink 2, 3 and 4, in one direction (NVIDIA's data sheets: 12 lanes, 300 GB/s on an A100)."""


@dataclass(frozen=True)
class Topology:
    """Links between GPUs, by their numbers."""

    gpus: int
    links: dict[tuple[int, int], str]

    def lanes(self, one: int, other: int) -> int:
        """Of NVLink between two GPUs."""
        found = re.fullmatch(r"NV(\d+)", self.links.get((one, other), ""))
        return int(found[1]) if found else 0

    @property
    def islands(self) -> list[list[int]]:
        """GPUs that NVLink joins, directly or through others."""
        left, found = set(range(self.gpus)), []
        while left:
            island, open_ = set(), [min(left)]
            while open_:
                one = open_.pop()
                island.add(one)
                open_ += [other for other in left - island if self.lanes(one, other)]
            left -= island
            found.append(sorted(island))
        return found

    @property
    def domain(self) -> int:
        """GPUs that share the fast link: of islands of different sizes, the smallest; 1 without NVLink."""
        return min((len(island) for island in self.islands), default=1)

    @property
    def switched(self) -> bool:
        """Whether every GPU of an island reaches every other of it with all of its lanes."""
        return all(
            len({self.lanes(a, b) for a in island for b in island if a != b}) == 1
            for island in self.islands
            if len(island) > 1
        )

    @property
    def bandwidth(self) -> float:
        """Bytes/s of NVLink out of the GPU that has least, to all of its peers together; 0 without."""
        if self.domain == 1:
            return 0.0
        out = lambda one: [self.lanes(one, other) for other in range(self.gpus) if other != one]
        each = (max(out(one)) if self.switched else sum(out(one)) for one in range(self.gpus))
        return min(each) * LANE


def parsed(text: str) -> Topology | None:
    """What ``nvidia-smi topo -m`` printed; None if it is no such table."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next((line for line in lines if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        return None
    names = head.split("CPU Affinity")[0].split()
    links: dict[tuple[int, int], str] = {}
    rows = 0
    for line in lines[lines.index(head) + 1 :]:
        cells = line.split()
        found = re.fullmatch(r"GPU(\d+)", cells[0]) if cells else None
        if found is None:
            continue
        rows += 1
        for name, word in zip(names, cells[1:], strict=False):
            if (other := re.fullmatch(r"GPU(\d+)", name)) and word != "X":
                links[int(found[1]), int(other[1])] = word
    return Topology(rows, links) if rows else None


def topology() -> Topology | None:
    """Of this machine; None where the tool is missing or says nothing."""
    try:
        said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parsed(said.stdout)
