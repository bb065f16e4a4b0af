"""How gradients become weights.

allreduce   gradients are summed over the ranks while backward runs; every rank steps its own optimizer
scatter     each gradient is summed to the rank that owns that part of the weights
across      either, for a model that is spread over ranks which work on the same samples
local       every rank steps for itself; weights are averaged now and then
update      the step itself: norm, clipping, what to do with a NaN, optimizer, schedule, averaged weights
"""
