"""Recurrent layers on pieces: each rank computes its own positions from the state that the rank before it ended with.

So a rank keeps 1/n of the activations; ranks compute one after another, in no less time than one device.

    traffic   the state of each rank, summed over the ranks, forward and backward
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.context.piece import Piece, attended, pieces, rule
from meshfit.comm.collectives import all_reduce
from meshfit.comm.draws import own_draws


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Any, x: Any, hx: Any, weights: Any, *rest: Any) -> Any:
    """As ``nn.RNNBase`` calls them: rest is has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    if not isinstance(x, Piece) or len(rest) != 6 or pieces((hx, weights)) or x.span.zigzag or not x.span.plain:
        return NotImplemented
    settings: list[Any] = list(rest)
    dropout, training, bidirectional, batch_first = settings[2:]
    if bidirectional or x.dim() != 3 or x.span.dim != (1 if batch_first else 0):
        return NotImplemented
    attended["carried"] += 1
    group, several = x.group, isinstance(hx, tuple | list)
    state: Any = torch.stack(tuple(hx)) if several else hx
    # So that backward, too, comes to every sum on every rank: parts of tensors, without elements
    out: Any = None
    local = x.plain()
    link = local.flatten()[:0].sum() + weights[0].flatten()[:0].sum()
    links: list[Tensor] = []
    for turn in range(group.size):
        mine = torch.zeros_like(state)
        if turn == group.rank:
            given = tuple(state.unbind(0)) if several else state
            with own_draws(group, x.device) if dropout and training else nullcontext():
                out, *last = func(local, given, weights, *settings)
            mine = torch.stack(last) if several else last[0]
        state = all_reduce(mine + link, group)
        links.append(state.flatten()[:0].sum())
    made, state = Piece(out + sum(links), x.span, group), state + sum(links)
    return (made, *state.unbind(0)) if several else (made, state)
