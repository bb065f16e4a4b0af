"""Where each tensor lives: the axes of the mesh, one folder each, and the other words that change how a model is laid
out (recompute, offload, precision, compile).

An axis is four verbs (axis.py). ``find``, ``place`` and ``cost`` are loops over ``ORDER`` (order.py). Around that loop:

- before it, every rank starts from the same weights, still in host memory, and the optimizer is made: it sees whole
  shapes
- after it, precision goes around each forward, offload moves what the optimizer holds, and the whole is compiled,
  model and loss together, where nothing acts inside the model

``check`` (refuse.py) says what a model cannot take, in the caller, before any process starts.
"""
