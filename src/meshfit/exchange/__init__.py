"""How gradients become weights.

allreduce   gradients are summed over the ranks while backward runs; every rank steps its own optimizer
update      the step itself: norm, clipping, what to do with a NaN, optimizer, schedule, averaged weights
"""
