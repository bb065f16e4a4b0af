"""A model that is cut over a tensor group trains like one device; nothing is cut that was not checked."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor as Array
from torch import nn

from benchmarks.zoo import ZOO, Case, mean_loss, seeded, train_alone, transformers, unpadded_text
from meshfit.anatomy import trace
from meshfit.anatomy.copies import study
from meshfit.axes.cut_parameters import CutParameters
from meshfit.axes.prove import Refused
from meshfit.axes.tensor import plan as tensor_plan
from meshfit.axes.tensor.check import check, reference
from meshfit.axes.tensor.cost import tensor_cost
from meshfit.axes.tensor.cut import split_model
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.region import VOCABULARY, Cut, Region, TensorPlan
from meshfit.axes.tensor.watch import watch
from meshfit.comm import group as comm_group
from tests import odd_blocks
from tests.distributed import distributed
from tests.few import more

cloudpickle.register_pickle_by_value(odd_blocks)

SAMPLES, STEPS = 4, 4


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Training


def wide(case: Case, dtype: torch.dtype) -> Case:
    """``case`` in another precision."""

    def cast(data: Any) -> Any:
        if isinstance(data, dict):
            return {name: cast(value) for name, value in data.items()}
        if isinstance(data, tuple):
            return tuple(cast(value) for value in data)
        return data.to(dtype) if data.is_floating_point() else data

    return replace(case, build=lambda: case.build().to(dtype), data=lambda n: cast(case.data(n)), dtype=dtype)


def plan_of(case: Case, degree: int) -> TensorPlan:
    batch = case.data(SAMPLES)
    return plan_tensor(case.build(), lambda model: mean_loss(case, model, batch), degree)


def spread(model: nn.Module, plan: TensorPlan) -> CutParameters:
    return split_model(model, plan, dist.group.WORLD)


def trained(case: Case, plan: TensorPlan) -> tuple[list[float], dict[str, Array], nn.Module]:
    """As ``train_alone``, on the ranks of a tensor group: losses and whole weights."""
    model, batch, losses = case.build().train(), case.data(SAMPLES), []
    names = [name for name, _ in model.named_parameters()]
    parts = spread(model, plan)
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = mean_loss(case, model, batch)
        loss.backward()
        parts.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            assert parts.whole(parameter, value).shape in (value.shape, *whole_shapes(parameter, parts))
    parts.undo()
    return losses, dict(model.state_dict()), model


def whole_shapes(parameter: Array, parts: CutParameters) -> list[torch.Size]:
    return [parts.whole(parameter, parameter.data).shape]


def differences(case: Case, plan: TensorPlan, want: tuple[list[float], dict[str, Array]]) -> tuple[float, float]:
    """The largest of losses and of weights."""
    losses, weights, _ = trained(case, plan)
    assert weights.keys() == want[1].keys()
    apart = [(weights[name].double() - value.double()).abs().max().item() for name, value in want[1].items()]
    return max(abs(a - b) for a, b in zip(losses, want[0], strict=True)), max(apart)


@distributed(world=2, timeout=240)
def assert_two_train_alike(jobs: dict[str, tuple], cases: dict[str, Case]) -> None:
    assert_alike(jobs, cases)


@distributed(world=4, timeout=240)
def assert_four_train_alike(jobs: dict[str, tuple], cases: dict[str, Case]) -> None:
    assert_alike(jobs, cases)


def assert_alike(jobs: dict[str, tuple], cases: dict[str, Case]) -> None:
    torch.set_num_threads(1)
    wrong = []
    for name, (plan, want, dtype, limits) in jobs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = differences(wide(cases[name], dtype), plan, want)
        if not all(got <= limit for got, limit in zip(found, limits, strict=True)):
            wrong.append(f"{name} in {dtype}: losses differ by {found[0]:.1e}, weights by {found[1]:.1e}")
    assert not wrong, wrong


def jobs_of(
    cases: dict[str, Case], degree: int, dtype: torch.dtype, limits: tuple[float, float], share: dict[str, float]
) -> dict[str, tuple]:
    """Losses inside models are computed in single precision, whatever these are in: that is their rounding."""
    jobs = {}
    for name, least in share.items():
        case = wide(cases[name], dtype)
        plan = plan_of(case, degree)
        assert cut_share(case.build(), plan) >= least, (name, cut_share(case.build(), plan), str(plan))
        want = train_alone(case, samples=SAMPLES, batch_size=SAMPLES, steps=STEPS)
        loose = (max(limits[0], 2e-6), max(limits[1], 2e-6)) if case.loss is None else limits
        jobs[name] = pickle.loads(pickle.dumps(plan)), want, dtype, loose
    return jobs


def cut_share(model: nn.Module, plan: TensorPlan) -> float:
    cuts = plan.cuts
    held = sum(p.numel() for name, p in model.named_parameters() if name in cuts)
    return held / sum(p.numel() for p in model.parameters())


def outside(case: Case) -> Case:
    """``case`` with a loss of the user's own."""

    def data(n: int) -> tuple[Array, Array]:
        text = case.data(n)
        return text["input_ids"], text["labels"]

    def loss(out: Any, labels: Array) -> Array:
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return replace(case, data=data, loss=loss, weight_of=lambda batch: 1.0)


TEXT = {"gpt2": 0.95, "llama": 0.98, "bert": 0.97, "t5": 0.95, "tied-gpt": 0.95, "lstm": 0.25}
TEXT |= {"gpt2-outside": 0.95, "llama-outside": 0.98}
CASES = ZOO | {f"{name}-outside": outside(ZOO[name]) for name in ("gpt2", "llama")}
IMAGES = {"vit": 0.95, "convnext": 0.8, "batchnorm-cnn": 0.95}
DEEP = {"resnet10": 0.95, "mobilenet": 0.95, "unet-diffusers": 0.96, "densenet": 0.95}
SMALL = {"two-inputs": 0.95, "dict-output": 0.95, "partial": 0.5, "masked": 0.5}


@pytest.mark.parametrize("share", [TEXT, IMAGES, more(DEEP), SMALL], ids=["text", "images", "deep", "small"])
def test_two_ranks_train_like_one_device(share: dict[str, float]) -> None:
    """In double precision, where nothing but an error would show."""
    jobs = jobs_of(CASES, 2, torch.float64, (1e-9, 1e-7), share)
    assert_two_train_alike(jobs=jobs, cases={name: CASES[name] for name in share})


FOUR = {"gpt2": 0.95, "vit": 0.9}
FOUR_MORE = {"t5": 0.95, "llama": 0.98, "bert": 0.95, "tied-gpt": 0.95, "unet-diffusers": 0.95}
SINGLE = {"mixtral": 0.98, "tied-gpt": 0.8, "convnext": 0.8}
SINGLE_MORE = {"llama": 0.98, "t5": 0.9, "unet-diffusers": 0.96}


@pytest.mark.parametrize("share", [FOUR, more(FOUR_MORE)], ids=["some", "more"])
def test_four_ranks_train_like_one_device(share: dict[str, float]) -> None:
    jobs = jobs_of(ZOO, 4, torch.float64, (1e-9, 1e-7), share)
    assert_four_train_alike(jobs=jobs, cases={name: ZOO[name] for name in share})


@pytest.mark.parametrize("share", [SINGLE, more(SINGLE_MORE)], ids=["some", "more"])
def test_in_single_precision(share: dict[str, float]) -> None:
    jobs = jobs_of(ZOO, 2, torch.float32, (1e-5, 1e-4), share)
    assert_two_train_alike(jobs=jobs, cases={name: ZOO[name] for name in share})


# Models of other makes, met after the code was written


def language_model(kind: str, **sizes: Any) -> Case:
    def build() -> nn.Module:
        hf = transformers()
        config = getattr(hf, f"{kind}Config")(
            vocab_size=96, pad_token_id=0, bos_token_id=0, eos_token_id=0, hidden_size=32, num_hidden_layers=2, **sizes
        )
        return getattr(hf, f"{kind}ForCausalLM")(config)

    return Case(name=kind, build=seeded(build), data=unpadded_text)


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
HEADS = {"num_attention_heads": 4, "intermediate_size": 64}


class Padded(nn.Module):
    """torch's own encoder, with a mask of what is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(96, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(32, 96)

    def forward(self, ids: Array) -> Array:
        return self.head(self.encoder(self.token(ids), src_key_padding_mask=ids % 5 == 4))


FRESH = {
    "mamba": language_model("Mamba", state_size=4),
    "deepseek": language_model(
        "DeepseekV3", **HEADS, **LATENT, **EXPERTS, moe_intermediate_size=16, num_key_value_heads=4
    ),
    "qwen3": language_model("Qwen3", **HEADS, num_key_value_heads=2, head_dim=8),
    "phi3": language_model("Phi3", **HEADS, num_key_value_heads=2),
    "padded": Case(
        name="padded",
        build=seeded(Padded),
        data=lambda n: (unpadded_text(n)["input_ids"], unpadded_text(n)["labels"]),
        loss=lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    ),
}


def test_models_of_other_makes_train_like_one_device() -> None:
    """Some compute norms in single precision, whatever they are given; experts know no other."""
    share = {"mamba": 0.8, "qwen3": 0.95, "phi3": 0.95, "padded": 0.9}
    jobs = jobs_of(FRESH, 2, torch.float64, (1e-6, 1e-5), share)
    jobs |= jobs_of(FRESH, 2, torch.float32, (1e-5, 1e-4), {"deepseek": 0.85})
    assert_two_train_alike(jobs=jobs, cases=FRESH)


# Blocks that are in no library here


def odd_data(n: int) -> tuple[Array, Array]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, 6, generator=random), torch.randn(n, 8, 3, generator=random)


def odd_case(block: type[nn.Module]) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = odd_blocks.Host(block())
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return Case(name=block.__name__, build=build, data=odd_data, loss=F.mse_loss)


ODD = {block.__name__: odd_case(block) for block in (*odd_blocks.PAIRED, *odd_blocks.OTHERS)}


@pytest.mark.parametrize(("degree", "names"), [(2, ODD), more(4, ODD)])
def test_odd_blocks_train_like_one_device(degree: int, names: Iterable[str]) -> None:
    least = {name: 0.45 if name in ("Latents", "MultiQuery") else 0.8 for name in names}
    jobs = jobs_of(ODD, degree, torch.float64, (1e-9, 1e-7), least)
    {2: assert_two_train_alike, 4: assert_four_train_alike}[degree](jobs=jobs, cases=ODD)


@pytest.mark.parametrize("block", odd_blocks.PAIRED)
def test_odd_blocks_are_split_in_pairs(block: type[nn.Module]) -> None:
    assert any(region.kind != "gather" and region.module.startswith("block") for region in odd_plan(block).regions)


def odd_plan(block: type[nn.Module], degree: int = 2) -> TensorPlan:
    torch.manual_seed(0)
    x, y = odd_data(SAMPLES)
    return plan_tensor(odd_blocks.Host(block()), lambda model: F.mse_loss(model(x), y), degree)


# The check


def proof(block: type[nn.Module]) -> tuple[Any, Region]:
    """What a wrong region of ``block`` is to be measured by, and the right one."""
    torch.manual_seed(0)
    model, (x, y) = study(odd_blocks.Host(block())), odd_data(SAMPLES)
    region = next(r for r in odd_plan(block).regions if r.module.startswith("block") and r.kind != "gather")
    seen = watch(model, lambda model: F.mse_loss(model(x), y), {region.module})
    whole = reference(model.get_submodule(region.module), seen.calls[region.module])
    region = replace(region, module="")
    check(whole, [region], 2)
    return whole, region


def refused(whole: Any, region: Region) -> bool:
    try:
        check(whole, [region], 2)
    except Refused:
        return True
    return False


def recut(region: Region, name: str, ranges: Callable[[Cut], tuple]) -> Region:
    cuts = tuple(replace(cut, ranges=ranges(cut)) if cut.name == name else cut for cut in region.cuts)
    assert cuts != region.cuts
    return replace(region, cuts=cuts)


@pytest.mark.parametrize("block", odd_blocks.PAIRED)
def test_the_check_refuses_wrong_regions(block: type[nn.Module]) -> None:
    whole, region = proof(block)
    wrong = {
        "no sum of the inputs' gradients": replace(region, enters=(), raw=()),
        "no sum of the outputs": replace(region, leaves=(), raw=()),
        "shares of one weight in another order": recut(region, region.cuts[0].name, lambda cut: cut.ranges[::-1]),
    }
    if region.sources:
        wrong["no sum of what is read whole"] = replace(region, sources=())
    if region.partial:
        wrong["no sum of partial gradients"] = replace(region, partial=())
    if any(each.bias for each in region.leaves):
        wrong["a bias of each rank"] = replace(region, leaves=tuple(replace(e, bias="") for e in region.leaves))
    if region.draws:
        wrong["one stream of random numbers"] = replace(region, draws=False)
    for name, mutant in wrong.items():
        assert refused(whole, mutant), f"{name} was accepted"


def test_the_check_refuses_a_cut_across_queries_and_keys() -> None:
    whole, region = proof(odd_blocks.NormedHeads)
    with pytest.raises(Refused):
        check(whole, [recut(region, "qkv.weight", lambda cut: (((0, 48),), ((48, 96),)))], 2)


def test_the_check_refuses_statistics_that_are_whole() -> None:
    whole, region = proof(odd_blocks.GatedConvolution)
    cuts = tuple(cut for cut in region.cuts if "running" not in cut.name)
    with pytest.raises(Refused):
        check(whole, [replace(region, cuts=cuts)], 2)


def test_the_plan_is_the_same_each_time_and_leaves_the_model_alone() -> None:
    case = ZOO["batchnorm-cnn"]
    model, batch = case.build().eval(), case.data(SAMPLES)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = plan_tensor(model, lambda m: mean_loss(case, m, batch), 2)
    assert first == plan_tensor(model, lambda m: mean_loss(case, m, batch), 2)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_equal_blocks_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (2, 6):
        torch.manual_seed(0)
        model = [layer for _ in range(layers) for layer in (nn.LayerNorm(32), odd_blocks.NormedHeads())]
        x, checked = torch.randn(2, 8, 32), []
        monkeypatch.setattr(tensor_plan, "check", lambda *args, checked=checked: checked.append(1) or check(*args))
        plan = plan_tensor(nn.Sequential(nn.Linear(32, 32), *model), lambda m, x=x: m(x).square().mean(), 2)
        assert sum(region.kind == "attention" for region in plan.regions) == layers
        counts.append(len(checked))
    assert counts[0] == counts[1]


# On ranks


@distributed(world=2)
def test_dropout_differs_inside_and_agrees_outside() -> None:
    torch.manual_seed(0)
    x, y = odd_data(SAMPLES)
    model = odd_blocks.Host(odd_blocks.Interleaved())
    plan = plan_tensor(model, lambda m: F.mse_loss(m(x), y), 2)
    parts = spread(model, plan)
    drops: list[Array] = []
    model.block.drop.register_forward_hook(lambda module, args, out: drops.append((out == 0).detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        parts.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    inside, outside = drops[0::2], drops[1::2]
    for masks, same in ((inside, False), (outside, True)):
        for mask in masks:
            other = parts.ranks.all_gather(mask.int())
            assert torch.equal(other[0], other[1]) == same
            assert 0.1 < mask.float().mean() < 0.3
    assert not torch.equal(outside[0], outside[1])
    for value in (loss.detach(), *(p.detach() for p in model.parameters() if not parts.is_cut(p))):
        first, second = parts.ranks.all_gather(value)
        assert torch.equal(first, second)
    assert torch.equal(*parts.ranks.all_gather(torch.get_rng_state()))


@distributed(world=2)
def test_the_norm_of_gradients_counts_each_once_and_undo_gives_all_back() -> None:
    x, y = (t.double() for t in odd_data(SAMPLES))
    for block in (odd_blocks.NormedHeads, odd_blocks.GatedConvolution, odd_blocks.Configured, odd_blocks.Latents):
        torch.manual_seed(0)
        alone = odd_blocks.Host(block()).double()
        model = copy.deepcopy(alone)
        plan = plan_tensor(model, lambda m: F.mse_loss(m(x), y), 2)
        parts = spread(model, plan)
        for each in (alone, model):
            F.mse_loss(each(x), y).backward()
        parts.after_backward()
        want = {name: p.grad for name, p in alone.named_parameters()}
        own = torch.zeros((), dtype=torch.float64)
        for name, p in model.named_parameters():
            torch.testing.assert_close(parts.whole(p, p.grad), want[name], rtol=1e-9, atol=1e-12)
            if parts.is_cut(p) or parts.ranks.rank == 0:
                own += p.grad.square().sum()
        norm = parts.ranks.all_reduce(own).sqrt()
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in want.values()]).norm())
        parts.undo()
        assert all(torch.equal(p, q) for p, q in zip(alone.parameters(), model.parameters(), strict=True))
        assert vars(model.block).keys() == vars(alone.block).keys()
        torch.testing.assert_close(model.eval()(x), alone.eval()(x), rtol=1e-12, atol=1e-14)


@distributed(world=2)
def test_evaluation_takes_no_short_cut_past_the_regions() -> None:
    """torch's own blocks read their weights by themselves when nothing is trained."""
    torch.manual_seed(0)
    alone = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).double()
    model, x = copy.deepcopy(alone), torch.randn(3, 5, 32, dtype=torch.float64)
    parts = spread(model, plan_tensor(model, lambda m: m(x).square().mean(), 2))
    assert sum(parts.is_cut(p) for p in model.parameters()) >= 8
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = alone.eval()(x, src_key_padding_mask=padding)
        torch.testing.assert_close(model.eval()(x, src_key_padding_mask=padding)[~padding], want[~padding])


# Cost


@distributed(world=2)
def assert_cost(jobs: dict[str, tuple]) -> None:
    for name, (plan, weights, cost) in jobs.items():
        case = ZOO[name]
        model, batch = case.build().train(), case.data(SAMPLES)
        parts = spread(model, plan)
        assert sum(p.numel() * p.element_size() for p in model.parameters()) == weights
        calls, moved = dict.fromkeys(cost.calls, 0), dict.fromkeys(cost.calls, 0)
        reduce, gather = dist.all_reduce, comm_group.all_gather_single

        def counted_reduce(x: Array, calls=calls, moved=moved, reduce=reduce, **given: Any) -> Any:
            calls["all_reduce"] += 1
            moved["all_reduce"] += x.numel() * x.element_size()
            return reduce(x, **given)

        def counted_gather(out: Array, x: Array, calls=calls, moved=moved, gather=gather, **given: Any) -> Any:
            calls["all_gather"] += 1
            moved["all_gather"] += out.numel() * out.element_size()
            return gather(out, x, **given)

        dist.all_reduce, comm_group.all_gather_single = counted_reduce, counted_gather
        try:
            mean_loss(case, model, batch).backward()
            parts.after_backward()
        finally:
            dist.all_reduce, comm_group.all_gather_single = reduce, gather
        assert (calls, moved) == (cost.calls, cost.moved), name


@pytest.mark.parametrize(
    "names",
    [("gpt2", "tied-gpt", "batchnorm-cnn", "two-inputs"), more(("llama", "bert", "t5"))],
    ids=["some", "more"],
)
def test_cost_is_what_is_counted(names: tuple[str, ...]) -> None:
    jobs = {}
    for name in names:
        case = ZOO[name]
        data = case.data(SAMPLES)
        plan = plan_of(case, 2)
        after, cost = tensor_cost(trace(case.build(), data if case.loss is None else data[0]), plan)
        jobs[name] = plan, after.parameter_bytes, cost
    assert_cost(jobs=jobs)


def test_a_transformer_block_sums_twice_forward_and_twice_backward() -> None:
    for name, layers in (("gpt2", 2), ("llama", 3), ("tied-gpt", 2), ("vit", 3)):
        plan = plan_of(ZOO[name], 2)
        regions = [region for region in plan.regions if region.kind not in ("gather", *VOCABULARY)]
        inside = [t for region in regions for t in region.traffic]
        assert [t.op for t in inside] == ["all_reduce"] * 4 * layers
        assert sum(t.backward for t in inside) == 2 * layers


# Fewer heads of keys and values than ranks


GROUPED = {
    "two": language_model("Llama", num_attention_heads=8, intermediate_size=64, num_key_value_heads=2),
    "one": language_model("Llama", num_attention_heads=8, intermediate_size=64, num_key_value_heads=1),
    "biased": language_model("Qwen2", num_attention_heads=8, intermediate_size=64, num_key_value_heads=2),
    "repeated": language_model(
        "Llama", num_attention_heads=8, intermediate_size=64, num_key_value_heads=2, attn_implementation="eager"
    ),
    "normed": language_model("Qwen3", num_attention_heads=8, intermediate_size=64, num_key_value_heads=2, head_dim=8),
}


@pytest.mark.parametrize(
    "share",
    [{"two": 0.98, "one": 0.9, "normed": 0.98}, more({"biased": 0.98, "repeated": 0.98})],
    ids=["some", "more"],
)
def test_heads_of_keys_that_do_not_go_round_are_held_by_several_ranks(share: dict[str, float]) -> None:
    plan = plan_of(wide(GROUPED["two"], torch.float64), 4)
    assert [region.kind for region in plan.regions if region.module.endswith("self_attn")] == ["attention"] * 2
    cuts = plan.cuts
    assert {
        cuts[f"model.layers.{i}.self_attn.{name}.weight"].copies for i in (0, 1) for name in ("k_proj", "v_proj")
    } == {2}
    assert cuts["model.layers.0.self_attn.q_proj.weight"].copies == 1
    jobs = jobs_of(GROUPED, 4, torch.float64, (1e-6, 1e-5), share)
    assert not any(region.kind == "gather" for plan, *_ in jobs.values() for region in plan.regions)
    assert_four_train_alike(jobs=jobs, cases=GROUPED)
