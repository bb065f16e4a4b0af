"""What a plan makes of buffers that a forward writes: exact, refused, or each rank's own where the plan says so."""

from meshfit.axes.buffers.find import Written
from meshfit.errors import PlanError
from meshfit.plan import Plan

LOCAL = "buffers=local in the plan lets every rank, and every microbatch, update its own; rank 0's are saved"


def splits(plan: Plan) -> bool:
    """Whether a batch goes through the model in parts."""
    return plan.shares > 1 or plan.microbatches > 1 or plan.context > 1 or plan.server > 0


def check(plan: Plan, written: Written, *, by_rows: bool, joins: bool) -> None:
    """Refuse what would not be the update of one device. ``by_rows``: ranks of the tensor axis hold rows of
    activations; ``joins``: workers come later, with buffers of their own."""
    if not written.names or plan.buffers == "local":
        return
    if not plan.in_step or joins:
        how = "join a run when they come" if joins else "step for themselves"
        raise _refusal(plan, written.names[0], f"ranks that {how} have no buffers in common", "")
    if written.refused and (splits(plan) or by_rows):
        name, why = next(iter(written.refused.items()))
        raise _refusal(plan, name, why, "data=1 with one microbatch works as it is")
    if written.parameters and plan.cuts:
        whole = plan.without("shard", offload="none")
        why = "it is a parameter, of which each rank keeps a slice: what the forward writes is a copy"
        raise _refusal(plan, written.parameters[0], why, f"{whole} works")
    if not written.writers or not (splits(plan) or by_rows):
        return
    name = written.combined[0]
    staged = plan.pipeline > 1 and written.writers[0].path == ""
    against = {
        "rows of activations lie on different ranks": (by_rows, [], {"sequence": "whole"}),
        "each rank has some positions of every sequence": (plan.context > 1, ["context"], {}),
        "samples travel between ranks": (plan.expert > 1, ["expert"], {}),
        "ranks hold different branches": (plan.branch > 1, ["branch"], {}),
        "it is written by the forward of the whole model, which is cut": (staged, ["pipeline"], {}),
        "it is read out of the forward, which is compiled whole": (plan.compile == "whole", [], {"compile": "auto"}),
    }
    for why, (so, axes, words) in against.items():
        if so:
            raise _refusal(plan, name, why, f"{plan.without(*axes, **words)} works")


def _refusal(plan: Plan, name: str, why: str, works: str) -> PlanError:
    headline = f"{plan}: the buffer {name}, which the forward writes, would not be that of one device"
    return PlanError(headline, why, works, LOCAL)


def notes(plan: Plan, written: Written) -> list[str]:
    """What the user should know before training."""
    if not written.names:
        return []
    if plan.buffers == "local":
        return [f"buffers: {_listed(written.names)}: every rank updates its own; the first rank's are saved"]
    found = []
    if written.writers:
        found.append(f"buffers: {_listed(written.combined)}: updated once a step, from the whole batch")
    if written.kept:
        found.append(f"buffers: {_listed(written.kept)}: do not depend on samples, updated once a step")
    if written.refused:
        found.append(f"buffers: {_listed(tuple(written.refused))}: written by the forward; the batch is not split")
    return found


def _listed(names: tuple[str, ...], most: int = 20) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
