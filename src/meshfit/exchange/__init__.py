"""How gradients become weights.

allreduce   gradients are summed over the ranks while backward runs; every rank steps its own optimizer
across      the same for a model that is spread over ranks which work on the same samples
scatter     each gradient is summed to the rank that owns that part of the weights
serving     gradients go to model servers, which step for all; weights come back
local       every rank steps for itself; weights are averaged now and then
nature      what kind of optimizer it is, and what it keeps
update      the step itself: norm, clipping, what to do with a NaN, optimizer, schedule, averaged weights
"""
