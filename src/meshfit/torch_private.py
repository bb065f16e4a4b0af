"""Every private or version-dependent piece of torch that meshfit uses: no other file of the package reaches for one
(tests/test_torch_private.py holds that, and checks each piece). Supported: torch 2.11 to 2.13."""

import ctypes
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from meshfit.patches import replaced

__all__ = ["BatchNorm", "Convolution", "Dropout", "RunningNorm"]  # base classes of all dims, with no public name
__all__ += ["TorchDispatchMode"]  # documented, but only in this place
__all__ += ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
"""Trees as torch's own functions see them, with the containers that others register (transformers' caches); those of
batches are ``meshfit.data.tree``'s."""

aten: Any = torch.ops.aten

# Tensors


def storage_id(tensor: Tensor | torch.UntypedStorage) -> int:
    """A number that tensors have in common which share memory, as long as one of them lives. ``data_ptr`` is 0 for all
    that have no memory: on meta, or of no elements."""
    storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
    return storage._cdata


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """What a typed storage is of; its public method warns of deprecation."""
    return storage._untyped_storage


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; -1 for one of inference mode, where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def detached_alias(tensor: Tensor) -> Tensor:
    """Detached, below autograd, with the same count of changes in place: ``detach`` in a dispatch mode begins anew."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that a view is of."""
    return view._base


def call_a_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` hold: some forwards ask."""
    tensor._is_param = True  # type: ignore[attr-defined]


def wrapper_of(kind: type[Any], shape: list[int], like: Tensor) -> Any:
    """A tensor of the subclass ``kind`` with a shape and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """``parameter.data = data``, also where the parameter is on meta and ``data`` is not: it stays the same object."""
    if not parameter.is_meta or data.is_meta:
        parameter.data = data
        return
    new: Any = Tensor._make_subclass(type(parameter), data.detach(), parameter.requires_grad)  # type: ignore[attr-defined]
    vars(new).update(vars(parameter))
    torch.utils.swap_tensors(parameter, new)


def local_part(tensor: Tensor) -> Tensor:
    """Of a DTensor what this rank holds, outside of autograd; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_wrapper(kind: type) -> bool:
    """Whether a class of tensors is made of other tensors, like DTensor; fake tensors are not."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # there is none before it is imported, which takes long
    return hasattr(kind, "__tensor_flatten__") and not (fake is not None and issubclass(kind, fake.FakeTensor))


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


# Kernels

foreach_add, foreach_copy_, foreach_lerp_ = torch._foreach_add, torch._foreach_copy_, torch._foreach_lerp_
foreach_mul_, foreach_norm, foreach_zero_ = torch._foreach_mul_, torch._foreach_norm, torch._foreach_zero_
"""One kernel for a list of tensors: documented, as a beta."""

update_loss_scale_ = torch._amp_update_scale_
"""Of ``GradScaler``, on the device."""

assert_on_device = torch._assert_async
"""Fails the stream, later, where a tensor holds False: the host does not wait."""

negated_view = torch._neg_view

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Take ``group["fused"] = True`` after construction, and then ``found_inf`` and ``grad_scale`` as attributes."""


@functools.cache
def autocast_grouped_products(device: str = "cuda") -> torch.library.Library:
    """Let autocast to bfloat16 hold for ``F.grouped_mm`` too, as for every other matrix product: in fp32 torch runs it
    as a loop, for which the host waits. Its kernel takes rows of a multiple of 16 bytes; others stay as they are."""
    library = torch.library.Library("aten", "IMPL")
    key = f"Autocast{device.upper()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
        return library  # torch does so by itself

    def product(x: Tensor, weight: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        fits = all(size % 8 == 0 for size in (x.shape[-1], *weight.shape[-2:]))
        if fits and torch.get_autocast_dtype(device) is torch.bfloat16:
            x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        with torch.autocast(device, enabled=False):
            return aten._grouped_mm(x, weight, offs, bias, out_dtype)

    library.impl("_grouped_mm", product, key)
    return library


attention_by_products = aten._scaled_dot_product_attention_math
attention_on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
attention_on_cuda = aten._scaled_dot_product_flash_attention
attention_with_bias_on_cuda = aten._scaled_dot_product_efficient_attention
rms_norm_on_cuda = aten._fused_rms_norm
scaled_product = aten._scaled_mm
grouped_product = aten._grouped_mm
recurrence_on_cuda = aten._cudnn_rnn
recurrence_on_cuda_backward = aten._cudnn_rnn_backward
convolution_of_scripts = aten._convolution

GROUPED_PRODUCTS = grouped_product, aten._scaled_grouped_mm
FUSED_ATTENTIONS = (
    attention_on_cpu,
    attention_on_cuda,
    attention_with_bias_on_cuda,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
)
FUSED_ATTENTIONS_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
)
RAGGED_ATTENTIONS = aten._flash_attention_forward, aten._efficient_attention_forward
VIEWS_NOT_SAID = aten._unsafe_view, aten._reshape_alias
"""Their schema does not say that they share memory with what they are given."""


# Operators

OpOverload = torch._ops.OpOverload


def schema_of(op: Any) -> Any:
    """Names, defaults and aliasing of an operator's arguments and results."""
    return op._schema


def packet_of(overload: Any) -> Any:
    """``aten.mm`` of ``aten.mm.default``."""
    return overload._overloadpacket


def qualified_name(packet: Any) -> str:
    """``aten::mm`` of ``aten.mm``."""
    return packet._qualified_op_name


def is_overload(func: Any) -> bool:
    """Whether it is an operation, not a function that calls some."""
    return isinstance(func, torch._ops.OpOverload)


def is_composite(overload: Any) -> bool:
    """Whether an operator is written in others, through which autograd goes."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def unregister(library: torch.library.Library) -> None:
    """Take back the kernels of a library now: nothing public does, and garbage is collected some time."""
    library._destroy()


def without_torch_function() -> AbstractContextManager[None]:
    """No mode or subclass is asked about functions called within."""
    return torch._C.DisableTorchFunction()  # type: ignore[return-value]


def in_place_of_rejection_sampling(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Within it ``make(before)`` is called where ``nn.init.trunc_normal_`` draws until all numbers are within its
    bounds."""
    return replaced(torch.nn.init, "_no_grad_trunc_normal_", make)


def without_subclasses() -> AbstractContextManager[None]:
    """No subclass is asked about functions called within; modes are."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[return-value]


def in_function_transform() -> bool:
    """Whether this runs within ``torch.func``'s grad, vmap or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


# Modules


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters, as it holds them: what is put there is not asked whether it is one, None included."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Likewise."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Likewise; ``named_children`` leaves out None, and what comes a second time."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def wrap_call(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Go around a module's call, its hooks included; ``module.forward`` is without them."""
    module.__dict__["_call_impl"] = around(module._call_impl)


def unwrap_call(module: nn.Module) -> None:
    module.__dict__.pop("_call_impl", None)


def map_tensors_in_place(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> nn.Module:
    """``fn`` of all parameters and buffers, as ``module.to`` does: parameters stay the objects that they are."""
    return module._apply(fn)


def without_weak_references(model: nn.Module) -> bool:
    """Whether nothing refers weakly to its parameters, as ``set_data`` needs it; torch's recurrent layers do so no
    more."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(
                module._flat_weight_refs
            )  # by which a parameter that was replaced is noticed: none will be
    return not any(weakref.getweakrefcount(p) for p in model.parameters())


def refresh_flat_weights(module: Any) -> None:
    """Recurrent layers keep a list of their weights beside their parameters: it would hold those that were replaced."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


# Optimizers


def called_step(optimizer: Any) -> None:
    """Its ``step`` counts as called: or schedulers warn."""
    optimizer._opt_called = True


def step_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Called before and after its ``step``."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(before.values()), list(after.values())


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that hold them."""


def without_step_hooks(optimizer: Any) -> None:
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def takes_loss_scale(optimizer: Any) -> None:
    """A fused one then reads ``found_inf`` and ``grad_scale``; torch sets it in the constructor alone."""
    optimizer._step_supports_amp_scaling = True


# Autograd


def in_backward() -> bool:
    """Whether autograd is running backward in this thread: what it calls is computed again."""
    return torch._C._current_graph_task_id() != -1


def will_run(node: Any) -> bool:
    """Within a backward: whether it will come to ``node``, or was asked for its gradient."""
    return torch._C._will_engine_execute_node(node)


def sequence_number(node: Any) -> int:
    """Of a node of the graph, in the order in which this thread made them."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """What the next node of this thread will have."""
    return torch.autograd._get_sequence_nr()


def saved_tensors_hooks_now() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Innermost pack and unpack hooks under which this runs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def checkpoint_now(*, again: bool = False) -> Callable[..., Any] | None:
    """Pack hook of the ``torch.utils.checkpoint`` (without reentrance) in which this runs, another one for each region:
    in its forward, with ``again`` also when backward computes it again."""
    names = ("_checkpoint_hook.", "_recomputation_hook.") if again else "_checkpoint_hook."
    hooks = saved_tensors_hooks_now()
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith(names) else None


CHECKPOINT_INPUTS = "_NoopSaveInputs"
"""The ``autograd.Function`` by which ``torch.utils.checkpoint`` holds its inputs, up to torch 2.11 or so."""

IN_PLACE_NODE, COPY_NODE = "CopySlices", "CloneBackward0"
"""Nodes of a write to a view, and of a copy that is saved before a write."""

PRODUCT_NODES = frozenset(
    f"{name}Backward0"
    for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Linear", "Convolution", "GroupedMm", "ScaledMm")
)
"""Nodes that compute the gradients of their weights apart from those of their inputs."""


def watched_functions(watch: Callable[..., Any], *, everywhere: bool = False) -> AbstractContextManager[None]:
    """Every ``autograd.Function`` that this thread, or one ``everywhere``, applies within runs as ``watch(function,
    apply, args, kwargs)``.

    Below ``Function.apply``, which calls this: a method that was bound before (``f = MyFunction.apply`` at the top of a
    file) comes by here too."""
    level: Any = torch.autograd.function._SingleLevelFunction

    def real(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(level, cls), "apply")(*args, **kwargs)  # noqa: B009

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not issubclass(cls, torch.autograd.Function):  # one that functorch made for a level of its own
                return before(cls, *args, **kwargs)
            return watch(cls, functools.partial(before, cls), args, kwargs)

        return apply

    return replaced(level, "apply", make, everywhere=everywhere, bind=classmethod, real=real)


def batches_of_one() -> AbstractContextManager[None]:
    """Within it ``F.batch_norm`` of this thread takes a single value a channel."""
    return replaced(torch.nn.functional, "_verify_batch_size", lambda before: lambda size: None)


T = TypeVar("T")


class ThreadValue(Generic[T]):
    """A value for each thread; autograd's threads have that of the thread that called backward. ``name`` is unique."""

    def __init__(self, name: str, default: T):
        self._name, self._default = f"meshfit.{name}", default

    def get(self) -> T:
        return torch._C._get_obj_in_tls(self._name) if torch._C._is_key_in_tls(self._name) else self._default

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        before = self.get()
        _stash(self._name, value)
        try:
            yield
        finally:
            _stash(self._name, before)


def _stash(name: str, value: object) -> None:
    """torch 2.11 gives back a reference to what it held before, but takes none to what it is given."""
    if not _stash_counts():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


@functools.cache
def _stash_counts() -> bool:
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("meshfit.probe", probe)
    counts = sys.getrefcount(probe) > before
    if not counts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return counts


# Compilation

COMPILER = "torch._dynamo"
"""Takes a second to import, and building an optimizer imports it."""


_compiling: list[tuple[int, frozenset[str]]] = []
_as_found: tuple[int, str] = (0, "")
_changing = threading.Lock()


@contextmanager
def compiling_alike(times: int, numbers: Iterable[str] = ()) -> Iterator[None]:
    """Within it, in all threads, code is compiled anew ``times`` times if need be (past its limit torch silently leaves
    code as it is), and what is compiled holds for any value of the integers that modules have under the names
    ``numbers``, unless their code decides by it."""
    mine = times, frozenset(numbers)
    with _changing:
        _compiling.append(mine)
        _set_compiling()
    try:
        yield
    finally:
        with _changing:
            _compiling.remove(mine)
            _set_compiling()


def _set_compiling() -> None:
    global _as_found
    from torch._dynamo import config

    if len(_compiling) == 1 and not _as_found[0]:
        _as_found = config.recompile_limit, torch.compiler.config.dynamic_sources
    limit, sources = _as_found
    numbers = sorted(frozenset().union(*(names for _, names in _compiling)))
    config.recompile_limit = max(limit, *(times for times, _ in _compiling)) if _compiling else limit
    torch.compiler.config.dynamic_sources = ",".join(
        [*([sources] if sources else []), *(rf".*\.{name}$" for name in numbers)]
    )
    if not _compiling:
        _as_found = 0, ""


def size_hint(size: Any) -> int:
    """The size of a dim that a captured graph knows, or what it was when the graph was captured."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def compiled_at(starts: Sequence[Any], graph: Any, inputs: Any, backend: str) -> Callable[..., Any]:
    """A captured graph compiled in pieces, each beginning with one of the nodes ``starts``, calls of functions all.
    Strides that a piece gives its results are those that the next is compiled for."""
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.backends.registry import lookup_backend

    compiler = lookup_backend(backend)
    if not starts:
        return compiler(graph, inputs)
    computing = (node for node in graph.graph.nodes if node.op == "call_function")
    marks = {*starts, next(computing)}

    class AtNodes(DDPOptimizer):  # it begins a piece where the one behind has bytes enough
        def add_param(self, bucket: Any, param: Any, name: str) -> None:
            pass

        def add_param_args(self, bucket: Any, node: Any) -> None:
            bucket.size += node in marks

    return AtNodes(1, compiler, 1).compile_fn(graph, inputs)


# Process groups

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""``reduce_scatter_tensor`` until torch 2.12."""


def all_gather_rows(
    wholes: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False
) -> list[dist.Work]:
    """Every rank's part of several rows, of any dtypes, in one call. What to wait for, if ``async_op``."""
    wholes, parts = [row.view(torch.uint8) for row in wholes], [row.view(torch.uint8) for row in parts]
    if len(wholes) == 1 or not _takes_several(group, wholes[0]):
        one = zip(wholes, parts, strict=True)
        return _begun(async_op, *(all_gather_single(w, p, group=group, async_op=async_op) for w, p in one))
    options = AllgatherOptions()
    options.asyncOp = async_op
    return _begun(async_op, group.allgather_into_tensor_coalesced(wholes, parts, options))


def reduce_scatter_rows(
    parts: list[Tensor], rows: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False
) -> list[dist.Work]:
    """This rank's part of the sum of several rows, of one dtype; likewise."""
    if len(rows) == 1 or not _takes_several(group, rows[0]):
        one = zip(parts, rows, strict=True)
        return _begun(async_op, *(reduce_scatter_single(p, r, group=group, async_op=async_op) for p, r in one))
    options = ReduceScatterOptions()
    options.asyncOp = async_op
    return _begun(async_op, group.reduce_scatter_tensor_coalesced(parts, rows, options))


def all_reduce_rows(rows: list[Tensor], group: dist.ProcessGroup, *, async_op: bool = False) -> list[dist.Work]:
    """The sums of several rows, of one dtype; likewise."""
    if len(rows) == 1 or not _takes_several(group, rows[0]):
        return _begun(async_op, *(dist.all_reduce(row, group=group, async_op=async_op) for row in rows))
    options = AllreduceCoalescedOptions()
    options.asyncOp = async_op
    return _begun(async_op, group.allreduce_coalesced(rows, options))


def _takes_several(group: dist.ProcessGroup, row: Tensor) -> bool:
    """Not gloo with tensors of GPUs: torch 2.11 then ends the process."""
    return row.is_cpu or group._get_backend(row.device).name() != "gloo"


def _begun(async_op: bool, *works: dist.Work | None) -> list[dist.Work]:
    """As torch's own functions: handles, or on GPUs what comes next in this stream waits."""
    begun = [work for work in works if work is not None]
    if async_op:
        return begun
    for work in begun:
        work.wait()
    return []


def become_world(group: dist.ProcessGroup, *outside: dist.ProcessGroup) -> None:
    """From now on this process's world is ``group``: ranks count within it, and what names no group is of it. Groups
    that reach out of it, ``outside``, can still be used for collectives; a process knows its own rank there."""
    from torch.distributed import distributed_c10d as c10d

    own, size = group.rank(), group.size()
    for other in outside:
        c10d._world.pg_group_ranks[other] = {own: other.rank()}
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    c10d._update_default_pg(group)


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store in which the ranks of a group found each other, under a prefix of its own."""
    from torch.distributed import distributed_c10d as c10d

    found = c10d._world.pg_map.get(group)
    return None if found is None else found[1]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` may wait."""
    for kind in ("cpu", "cuda"):
        try:
            options: Any = group._get_backend(torch.device(kind)).options
        except RuntimeError:  # it has none for that kind
            continue
        return options._timeout
    return None


def told(group: dist.ProcessGroup, number: int) -> list[int]:
    """What each rank of ``group`` says. Straight to its backend for CPUs: no device waits, and no meter counts it."""
    mine = torch.tensor([number])
    every = [torch.empty_like(mine) for _ in range(group.size())]
    backend: Any = group._get_backend(torch.device("cpu"))
    backend.allgather([every], [mine]).wait()
    return [int(each) for each in every]
