"""What a training would take on a cluster that nobody has rented yet: seconds and bytes, item by item.

accelerators.py   what one device can do: datasheets and microbenchmarks, with their sources
cluster.py        devices, nodes, links and prices, as a value
names.py          "8xH100", "p5.48xlarge", a file: how a cluster is written
detect.py         the machine at hand
topology.py       how its GPUs are joined
calibrate.py      the machine at hand, measured
prediction.py     what a step of a plan would take: what predictors return, and what the search asks of them
sizes.py          of a decoder that is described by its sizes
search.py         the best plan, and the best of each family
"""

from meshfit.planner.cluster import Cluster, Link

__all__ = ["Cluster", "Link"]
