"""Where each tensor lives. One file per axis, each a verb on a plain module, in place, keeping names.

They are applied in this order:

1. replicate    every rank starts from the same weights; BatchNorm is made global before anything wraps a call
2. precision    decides the arithmetic inside a forward; nothing about the weights
3. compile      last: it sees the model as the steps before left it
"""
