"""Trees as torch's own functions see them, with the containers that others register (transformers' caches); those of
batches are ``meshfit.data.tree``'s."""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
