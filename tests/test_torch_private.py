"""Every private piece of torch that meshfit uses is there, does what is expected of it, and is used in one folder."""

import copy
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from meshfit.launch.devices import Devices
from meshfit.launch.local import LocalRanks
from meshfit.launch.world import World
from meshfit.torch_private import autograd, compilation, groups, kernels, modules, operators, optimizers, tensors, trees

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_fused_optimizers_take_what_they_are_told_on_the_device() -> None:
    """Set after construction; ``found_inf`` skips the step, ``grad_scale`` divides the gradient."""
    for kind in optimizers.FUSED_OPTIMIZERS:
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)
        optimizer.param_groups[0]["fused"] = True
        weight.grad = torch.ones(3) * 4
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
        assert torch.equal(weight, torch.ones(3))
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
        optimizer.step()
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.ones(3)
        kind([plain], lr=0.1, fused=False, foreach=False).step()
        torch.testing.assert_close(weight.detach(), plain.detach())


def test_collectives_are_there() -> None:
    assert callable(groups.all_gather_single)
    assert callable(groups.reduce_scatter_single)


# Tensors


def test_storages_have_numbers_without_memory_too() -> None:
    x = torch.empty(4, 2, device="meta")
    assert tensors.storage_id(x) == tensors.storage_id(x[1:]) == tensors.storage_id(x.untyped_storage())
    other = torch.empty(4, 2, device="meta")
    assert tensors.storage_id(x) != tensors.storage_id(other)


def test_typed_storages_have_an_untyped_one() -> None:
    x = torch.arange(4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = x.storage()
    assert tensors.storage_id(tensors.untyped(typed)) == tensors.storage_id(x)


def test_changes_in_place_are_counted() -> None:
    x = torch.zeros(3)
    before, view = tensors.version(x), x[1:]
    view.add_(1)
    assert tensors.version(x) == tensors.version(view) == before + 1
    assert tensors.base_of(view) is x
    assert tensors.base_of(x) is None
    with torch.inference_mode():
        assert tensors.version(torch.zeros(3)) == -1


class _Aliases(operators.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made.append(tensors.detached_alias(out))
        return out


def test_an_alias_below_autograd_counts_changes_with_its_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    with _Aliases() as mode:
        y = x * 2
    before = tensors.version(mode.made[0])
    with torch.no_grad():
        y.add_(1)
    assert tensors.version(mode.made[0]) == before + 1
    assert not mode.made[0].requires_grad


def test_a_tensor_can_pass_for_a_parameter() -> None:
    x = torch.zeros(2)
    tensors.call_a_parameter(x)
    assert isinstance(x, nn.Parameter)


class _Wrapper(torch.Tensor):
    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise TypeError(func)


def test_tensors_made_of_others_are_told_from_fake_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    made = tensors.wrapper_of(_Wrapper, [3, 5], torch.zeros(1, dtype=torch.float64))
    assert type(made) is _Wrapper
    assert made.shape == (3, 5)
    assert made.dtype == torch.float64
    assert tensors.is_wrapper(_Wrapper)
    assert not tensors.is_wrapper(FakeTensor)
    assert not tensors.is_wrapper(torch.Tensor)
    assert tensors.local_part(made) is made


def test_hooks_on_gradients_are_seen() -> None:
    plain, hooked, after = (nn.Parameter(torch.ones(2)) for _ in range(3))
    hooked.register_hook(lambda g: g)
    after.register_post_accumulate_grad_hook(lambda p: None)
    assert [tensors.has_gradient_hooks(p) for p in (plain, hooked, after)] == [False, True, True]


# Kernels


def test_lists_of_tensors_take_one_kernel() -> None:
    many = [torch.full((2,), float(i + 1)) for i in range(3)]
    same = kernels.foreach_add(many, 0)
    kernels.foreach_mul_(many, 2.0)
    assert [float(x[0]) for x in many] == [2.0, 4.0, 6.0]
    kernels.foreach_lerp_(many, list(same), 1.0)
    assert [float(x[0]) for x in many] == [1.0, 2.0, 3.0]
    assert float(kernels.foreach_norm(many, 2.0, dtype=torch.float64)[1]) == 8.0**0.5
    kernels.foreach_zero_(many)
    kernels.foreach_copy_(many, list(same))
    assert [float(x[0]) for x in many] == [1.0, 2.0, 3.0]


def test_the_loss_scale_halves_and_doubles() -> None:
    scale, good = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    optimizers.update_loss_scale_(scale, good, torch.tensor(1.0), 2.0, 0.5, 1)
    assert float(scale) == 4.0
    optimizers.update_loss_scale_(scale, good, torch.tensor(0.0), 2.0, 0.5, 1)
    assert float(scale) == 8.0


def test_kernels_that_check_and_negate() -> None:
    kernels.assert_on_device(torch.tensor(True))
    with pytest.raises(RuntimeError):
        kernels.assert_on_device(torch.tensor(False))
    x = torch.ones(2)
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale = torch.full((), 0.5)
    made = kernels.scaled_mm(ones, ones.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    assert made.unique().tolist() == [4.0]
    assert kernels.negated_view(x).is_neg()
    assert tensors.storage_id(kernels.negated_view(x)) == tensors.storage_id(x)


def test_operators_have_schemas_and_packets() -> None:
    mm = torch.ops.aten.mm.default
    assert isinstance(mm, operators.OpOverload)
    assert operators.schema_of(mm).name == "aten::mm"
    assert operators.packet_of(mm) is torch.ops.aten.mm
    assert operators.qualified_name(torch.ops.aten.mm) == "aten::mm"
    assert operators.is_composite(torch.ops.aten.linear.default) or operators.is_composite(
        torch.ops.aten.reshape.default
    )
    assert not operators.is_composite(mm)


def test_attentions_run_on_meta() -> None:
    """Those of GPUs as well: their shapes are asked for without one."""
    query = torch.empty(2, 3, 8, 16, device="meta", dtype=torch.bfloat16)
    for op in (kernels.attention_by_products, kernels.attention_on_cpu, kernels.attention_on_cuda):
        assert op(query, query, query)[0].shape == query.shape
    made = kernels.attention_with_bias_on_cuda(query, query, query, None, True)
    assert made[0].shape == query.shape


def test_unregistered_kernels_are_gone() -> None:
    x = torch.empty(2, device="meta", requires_grad=True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", lambda x, p, train: torch.empty(7, device="meta"), "AutogradMeta")
    assert torch.dropout(x, 0.5, True).shape == (7,)
    operators.unregister(library)
    assert torch.dropout(x, 0.5, True).shape == (2,)


class _Seen(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Sub(torch.Tensor):
    pass


def test_functions_can_run_unseen() -> None:
    x, sub = torch.ones(2), torch.ones(2).as_subclass(_Sub)
    with _Seen() as seen:
        with operators.without_torch_function():
            torch.neg(x)
        with tensors.without_subclasses():
            assert type(torch.abs(sub)) is torch.Tensor
    assert "neg" not in seen.names
    assert "abs" in seen.names
    assert type(torch.abs(sub)) is _Sub


def test_function_transforms_are_noticed() -> None:
    assert not operators.in_function_transform()
    seen = []
    torch.vmap(lambda x: (seen.append(operators.in_function_transform()), x)[1])(torch.ones(2))
    assert seen == [True]


# Modules and optimizers


def test_modules_hold_their_own() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[0].register_buffer("extra", torch.zeros(1), persistent=False)
    assert set(modules.own_parameters(module[0])) == {"weight", "bias"}
    assert "running_mean" in modules.own_buffers(module[0])
    assert list(modules.own_modules(module)) == ["0", "1"]
    assert modules.non_persistent_buffers(module[0]) == {"extra"}
    modules.own_parameters(module[1])["bias"] = None
    assert module[1].bias is None
    assert isinstance(module[0], modules.BatchNorm)
    assert isinstance(module[0], modules.RunningNorm)
    assert isinstance(nn.InstanceNorm2d(2), modules.RunningNorm)
    assert isinstance(nn.Conv3d(1, 1, 1), modules.Convolution)
    assert isinstance(nn.Dropout2d(), modules.Dropout)


def test_calls_are_wrapped_with_their_hooks() -> None:
    module, order = nn.Identity(), []
    assert not modules.has_forward_hooks(module)
    module.register_forward_pre_hook(lambda *_: order.append("hook"))
    assert modules.has_forward_hooks(module)

    def around(call):
        return lambda *args: (order.append("around"), call(*args))[1]

    modules.wrap_call(module, around)
    module(torch.ones(1))
    modules.unwrap_call(module)
    module(torch.ones(1))
    assert order == ["around", "hook", "hook"]


def test_tensors_of_a_module_are_mapped_in_place() -> None:
    module = nn.BatchNorm1d(2)
    weight = module.weight
    assert modules.map_tensors_in_place(module, lambda t: t.double() if t.is_floating_point() else t) is module
    assert module.weight is weight
    assert weight.dtype == module.running_mean.dtype == torch.float64


def test_recurrent_layers_let_go_of_their_weights() -> None:
    module = nn.GRU(2, 2)
    weight = modules.own_parameters(module).pop("weight_ih_l0")
    alive = weakref.ref(weight)
    modules.own_parameters(module)["weight_ih_l0"] = torch.zeros(6, 2)
    del weight
    assert alive() is not None
    modules.refresh_flat_weights(module)
    assert alive() is None


def test_steps_of_optimizers() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before, after = lambda *_: None, lambda *_: None
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    assert optimizers.step_hooks(optimizer) == ([before], [after])
    twin = copy.copy(optimizer)
    optimizers.without_step_hooks(twin)
    assert optimizers.step_hooks(twin) == ([], [])
    assert optimizers.step_hooks(optimizer) == ([before], [after])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizers.called_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


# Autograd


def test_nodes_are_numbered_in_the_order_of_making() -> None:
    x = torch.ones(2, requires_grad=True)
    following = autograd.next_sequence_number()
    y, z = x * 2, x * 3
    assert autograd.sequence_number(y.grad_fn) == following
    assert autograd.sequence_number(z.grad_fn) == following + 1
    assert autograd.next_sequence_number() == following + 2


def test_backward_is_noticed() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(autograd.in_backward()))
    (x * 2).sum().backward()
    assert seen == [True]
    assert not autograd.in_backward()


def test_hooks_on_saved_tensors_are_found() -> None:
    pack, unpack = lambda x: x, lambda x: x
    assert autograd.saved_tensors_hooks_now() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert autograd.saved_tensors_hooks_now() == (pack, unpack)


def test_checkpoints_are_noticed_in_forward_and_again() -> None:
    seen = []

    def block(x):
        now, again = autograd.checkpoint_now(), autograd.checkpoint_now(again=True)
        seen.append((now is not None, again is not None))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    block(x)
    assert seen == [(True, True), (False, True), (False, False)]


def test_nodes_are_called_as_expected() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    made = [x @ x, torch.addmm(x, x, x), torch.bmm(x[None], x[None]), torch.mv(x, x[0]), nn.functional.linear(x, x)]
    made += [nn.functional.conv1d(x[None], x[:, :, None])]
    roots = [out.grad_fn.name() for out in made]  # type: ignore[union-attr]
    roots = [made[i].grad_fn.next_functions[0][0].name() if "Product" in n else n for i, n in enumerate(roots)]  # type: ignore
    assert set(roots[:4]) | {roots[-1]} <= autograd.PRODUCT_NODES
    assert x.clone().grad_fn.name() == autograd.COPY_NODE  # type: ignore[union-attr]
    base = x * 1
    base[0].mul_(2)
    assert base.grad_fn.name().endswith(autograd.IN_PLACE_NODE)  # type: ignore[union-attr]


def test_batch_norm_takes_one_sample_within() -> None:
    x, mean, var = torch.ones(1, 2), torch.zeros(2), torch.ones(2)
    with modules.batches_of_one():
        nn.functional.batch_norm(x, mean, var, training=True)
    with pytest.raises(ValueError, match="more than 1 value"):
        nn.functional.batch_norm(x, mean, var, training=True)


def test_trees_keep_what_others_register() -> None:
    tree = {"a": [torch.ones(1), (2, None)], "b": OrderedDict(c=3)}
    leaves, spec = trees.tree_flatten(tree)
    assert leaves[1:] == [2, None, 3] == trees.tree_leaves(tree)[1:]
    assert trees.tree_unflatten(leaves, spec) == tree
    assert isinstance(spec, trees.TreeSpec)
    assert trees.tree_map(type, tree)["b"]["c"] is int
    assert trees.tree_map_only(int, lambda n: -n, tree)["a"][1] == (-2, None)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return 2 * gradient


_double = _Double.apply


def test_functions_are_watched_however_they_are_called() -> None:
    seen = []

    def watch(function, apply, args, kwargs):
        seen.append(function)
        return apply(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with autograd.watched_functions(watch), autograd.watched_functions(watch):
        (_double(x) + _Double.apply(x)).sum().backward()  # type: ignore[operator]
    _double(x)
    assert seen == [_Double] * 4
    assert torch.equal(x.grad, torch.full((2,), 4.0))  # type: ignore[arg-type]


def test_functions_are_watched_in_one_thread_or_in_all() -> None:
    seen = []

    def watch(function, apply, args, kwargs):
        seen.append(threading.get_ident())
        return apply(*args, **kwargs)

    x = torch.ones(2)
    with ThreadPoolExecutor(1) as pool:
        with autograd.watched_functions(watch):
            pool.submit(_double, x).result()
            assert seen == []
        with autograd.watched_functions(watch, everywhere=True):
            pool.submit(_double, x).result()
        assert len(seen) == 1
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_threads_of_autograd_have_the_values_of_their_caller() -> None:
    """Deep in reentrant checkpoints backward goes on in another thread."""
    value = autograd.ThreadValue("test", "nobody's")
    seen = set()

    def nested(depth: int, x: torch.Tensor) -> torch.Tensor:
        seen.add((threading.get_ident(), value.get()))
        return torch.utils.checkpoint.checkpoint(nested, depth - 1, x * 2, use_reentrant=True) if depth else x * 2

    x = torch.ones(1, requires_grad=True)
    with value.set_to("mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested(70, x).sum().backward()
    assert len({thread for thread, _ in seen}) > 1
    assert {found for _, found in seen} == {"mine"}
    assert value.get() == "nobody's"
    with value.set_to("mine"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(value.get).result() == "nobody's"


@pytest.mark.filterwarnings("ignore")
def test_settings_of_the_compiler_are_given_back() -> None:
    from torch._dynamo import config

    found, sources = config.recompile_limit, torch.compiler.config.dynamic_sources
    first, second = compilation.compiling_alike(found + 5, ["a"]), compilation.compiling_alike(found + 9, ["b"])
    with first:
        second.__enter__()
        assert config.recompile_limit == found + 9
        assert torch.compiler.config.dynamic_sources.endswith(r".*\.a$,.*\.b$")
    assert config.recompile_limit == found + 9
    assert torch.compiler.config.dynamic_sources.endswith(r".*\.b$")
    second.__exit__(None, None, None)
    assert config.recompile_limit == found
    assert torch.compiler.config.dynamic_sources == sources


def test_graphs_are_compiled_in_pieces_that_begin_where_they_are_told() -> None:
    pieces: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        functions = [node for node in graph.graph.nodes if node.op == "call_function"]
        assert compilation.size_hint(functions[0].meta["example_value"].shape[0]) == 3
        run = compilation.compiled_at([functions[1], functions[3]], graph, inputs, "aot_eager")
        pieces.append(sum(1 for _ in run.children()))  # type: ignore[attr-defined]
        return run

    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: ((x.sin() * 2).cos() + 1) * 3 / 2, backend=backend)(x)
    y.sum().backward()
    assert pieces == [3]
    torch.testing.assert_close(x.grad, -3 * (2 * torch.ones(3).sin()).sin() * torch.ones(3).cos())


def test_a_node_knows_whether_backward_will_come_to_another() -> None:
    said = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    beside = x.clone()
    product = y * beside
    product.grad_fn.register_hook(lambda *_: said.append(autograd.will_run(beside.grad_fn)))  # type: ignore[union-attr]
    torch.autograd.grad(product.sum(), y, retain_graph=True)
    product.sum().backward()
    assert said == [False, True]


def _in_a_world_of_two(world: World, _: object) -> list[object]:
    """Four ranks, two by two: what they sum within their own two, within a group made there, and with the others."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own, other = pairs[world.rank // 2], across[world.rank % 2]
    groups.become_world(own, other)  # type: ignore[arg-type]
    within, both = dist.new_group([1, 0]), dist.get_process_group_ranks(dist.group.WORLD)  # type: ignore[arg-type]
    sums = [torch.tensor(10.0**world.rank) for _ in range(3)]
    for each, group in zip(sums, (None, within, other), strict=True):
        dist.all_reduce(each, group=group)
    said = [None, None]
    dist.all_gather_object(said, world.rank)
    return [dist.get_rank(), dist.get_world_size(), both, [float(each) for each in sums], said, dist.get_rank(other)]


def test_a_group_can_be_the_world() -> None:
    with LocalRanks(_in_a_world_of_two, size=4, devices=Devices("cpu", None)) as ranks:
        found = ranks.results
    assert found[0] == [0, 2, [0, 1], [11.0, 11.0, 101.0], [0, 1], 0]
    assert found[3] == [1, 2, [0, 1], [1100.0, 1100.0, 1010.0], [2, 3], 1]


def test_attention_in_parts_is_that_of_all_keys() -> None:
    q, k, v, weights = (torch.randn(2, 4, 6, 8, dtype=torch.double, requires_grad=True) for _ in range(4))
    want = torch.autograd.grad((F.scaled_dot_product_attention(q, k, v) * weights).sum(), (q, k, v))
    kernel = kernels.attention_kernel(q, k, v, scale=None, grouped=False)
    assert kernel is not None
    with torch.no_grad():
        halves = [[x[..., some, :] for x in (k, v)] for some in (slice(0, 2), slice(2, 6))]
        parts = [kernel.forward(q, *half, causal=False) for half in halves]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(part * (sums - total).exp() for part, sums, _ in parts)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
        of = [kernel.backward(weights, q, *half, out, total, (), causal=False) for half in halves]  # type: ignore[arg-type]
    torch.testing.assert_close(of[0][0] + of[1][0], want[0])
    for at in (1, 2):
        torch.testing.assert_close(torch.cat([of[0][at], of[1][at]], -2), want[at])


def test_values_of_threads_are_counted() -> None:
    """What is put there lives on, and what is taken away is let go."""
    value: autograd.ThreadValue[object] = autograd.ThreadValue("test.counted", None)
    held = [object() for _ in range(3)]
    before = [sys.getrefcount(each) for each in held]
    for _ in range(50):
        with value.set_to(held[0]), value.set_to(held[1]):
            assert value.get() is held[1]
            with value.set_to(held[2]):
                assert value.get() is held[2]
            assert value.get() is held[1]
    assert [sys.getrefcount(each) for each in held] == before
    with value.set_to(frozenset({10**6})):
        [frozenset({10**6 + i}) for i in range(100)]
        assert value.get() == frozenset({10**6})


def test_autocast_holds_for_grouped_products_for_a_while() -> None:
    """On CPUs here; the kernel is registered for GPUs alone."""
    x, weight = torch.randn(12, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)

    def kind() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.grouped_mm(x, weight, offs=ends).dtype

    assert kind() == torch.float32
    with kernels.grouped_products_in_autocast("cpu"):
        with kernels.grouped_products_in_autocast("cpu"), torch.autocast("cpu", torch.bfloat16):
            made = torch.nn.functional.grouped_mm(x, weight, offs=ends)
            odd = torch.nn.functional.grouped_mm(x[:, :4].contiguous(), weight[:, :4].contiguous(), offs=ends)
        assert (made.dtype, odd.dtype) == (torch.bfloat16, torch.float32)
        assert torch.nn.functional.grouped_mm(x, weight, offs=ends).dtype == torch.float32
        made.float().square().sum().backward()
        want = torch.cat([x[:4] @ weight[0], x[4:] @ weight[2]])
        torch.testing.assert_close(made.float(), want, rtol=0.05, atol=0.1)
        assert weight.grad is not None
        assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
        assert not weight.grad[1].any()
        assert kind() == torch.bfloat16  # another is still within
    assert kind() == torch.float32
