"""The context axis from inside: tensors of which each rank has some positions, and what is done to them.

span     which positions each rank has
piece    a tensor that is cut: it shows the shape of the whole
local    functions that a rank computes on its own positions
shapes   functions that move dims, or take some positions
mix      functions in which positions meet: products, attention, sums, losses
find     where in a model cutting begins
recurrence  what carries a state from position to position
check    the proof, before anything is trained
"""
