"""What is inside a model: one recorded forward -> events, values, costs, cuts, branches, blocks, ties."""
