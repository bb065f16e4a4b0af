"""A plan for a number of devices: open degrees filled in, or refused; the same plan on fewer of them."""

from dataclasses import replace

from meshfit.errors import PlanError
from meshfit.plan import DEGREES, Plan
from meshfit.plan_words import OPEN, words_of


def settle(plan: Plan | str, devices: int | None) -> Plan:
    """The plan to run: parsed, "auto" filled in, and checked against the number of devices.

    ``devices`` is None where any number of CPU ranks may be started.
    """
    if isinstance(plan, Plan):
        settled = plan
    elif isinstance(plan, str) and plan.split()[:1] == ["auto"]:
        rest = plan.partition("auto")[2]
        if any(word.partition("=")[0] in DEGREES for word in rest.split()):
            raise PlanError(f"{plan!r}: auto chooses the degrees itself", f"write {rest.strip()!r} to choose them")
        settled = replace(Plan.parse(rest), data=devices or 1)
    else:
        settled = Plan.parse(_filled(plan, devices) if isinstance(plan, str) else plan)
    if devices is not None and settled.devices != devices:
        n = settled.devices
        raise PlanError(
            f"the plan needs {n} device{'s' * (n != 1)} but there {'is' if devices == 1 else 'are'} {devices}",
            f"{settled} takes {n}",
            f"data={devices} would use all of them" if devices > 1 else 'devices="cpu:2" starts two CPU ranks, say',
            f"or devices={n} takes the first {n}" if n < devices else "",
        )
    return settled


def settle_range(plan: Plan | str, most: int) -> Plan:
    """The plan as it would be on all devices of a range; one that names its degrees may take fewer than ``most``."""
    try:
        named = plan if isinstance(plan, Plan) else Plan.parse(plan)
    except PlanError:  # "auto", or a degree is open
        named = settle(plan, most)
    if named.devices > most:
        raise PlanError(f"{named} takes {named.devices} devices, and at most {most} are asked for")
    if named.server or named.exchange != "allreduce":
        own = f"server={named.server}" if named.server else f"exchange={named.exchange}"
        raise PlanError(
            f"{own} does not go with a range of devices",
            "workers of servers may come and go by themselves"
            if named.server
            else "each device takes steps of its own: with fewer it is another training",
        )
    return named


def on_fewer(plan: Plan, devices: int, batch: int | None = None) -> Plan:
    """The same plan on at most so many devices: fewer data or shard ranks, all else as it is. No share of a ``batch``
    is then without a sample."""
    inside = plan.devices // (plan.data * plan.shard)
    if devices < inside:
        degrees = " x ".join(f"{axis}={n}" for axis in DEGREES if (n := getattr(plan, axis)) > 1)
        raise PlanError(f"{devices} devices are left, and {degrees} needs {inside} for each copy of the model")
    for copies in range(min(devices, plan.devices) // inside, 0, -1):
        shard = min(plan.shard, copies)
        fitted = replace(plan, data=copies // shard, shard=shard, zero=plan.zero if shard > 1 else 3)
        if batch is None or fitted.shares * fitted.microbatches <= batch:
            return fitted
    return replace(plan, data=1, shard=1, zero=3)


def _filled(text: str, devices: int | None) -> str:
    """A plan's text with its open degree: "fsdp tp=2" on eight devices as "shard=4 tensor=2"."""
    words = [own for _, own in words_of(text)]
    if any(word.startswith("zero=") for word in words) and not {word.partition("=")[0] for word in words} & set(OPEN):
        words.insert(0, "shard")
    if not (missing := [word for word in words if word in OPEN]):
        return text
    rest = [word for word in words if word not in OPEN]
    if len(missing) > 1:
        raise PlanError(f"{text!r} leaves two degrees open", "say one of them: data=2 fsdp takes 2 copies, say")
    others = Plan.parse(" ".join(word for word in rest if not word.startswith("zero="))).devices
    return " ".join([f"{missing[0]}={max(1, (devices or others) // others)}", *rest])
