"""How a model runs in branches: see axes/branch/axis.py.

flow      what waits for what in a recording, which events must stay together, and the phases that follow
assign    which rank runs which events
ops       where ranks part and where they meet
program   what one rank runs of a microbatch
"""
