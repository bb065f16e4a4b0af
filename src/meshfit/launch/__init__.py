"""Starting ranks and finding devices: the only room that reads the environment.

    devices.py    which devices a run may use
    local.py      ``LocalRanks``: start ranks on this machine, talk with them, end them
    twins.py      refuses processes that a launcher started beside each other, and that no world joins
    world.py      who a rank is, and its process group; torchrun's ranks are read here
    rank.py       what a rank does from its first breath to its last
    warm.py       the caller's hold on the template
    template.py   the template: a process with torch imported, from which ranks are forked
    channel.py    messages between the caller and one rank
    machine.py    what this machine has, and what is wrong with it
    limits.py     how much a file of data may unfold to
    key.py        the key of a run that workers of other hosts may join
    arena.py      a message as bytes, its large tensors in memory that all ranks share

Who watches whom. A rank writes what it is at (``live.py``: step, phase, collectives, times, digests), and a thread of
it every few seconds how it gets on (``heartbeat.py``; where it stands: ``frames.py``), into memory that the caller
reads, or under torchrun into the store. ``Stalls`` (``stalls.py``) reads both, and finds who has stalled, is slow or
holds other weights (``compare.py``), or calls other collectives (``verdict.py``, which says all of it). ``LocalRanks``
looks, or under torchrun the first two ranks (``torchrun_watch.py``). Whether ranks are then started again:
``drive/restart.py``.

Nothing is imported here, so that ``warm.warm()`` can run before torch is imported.
"""
