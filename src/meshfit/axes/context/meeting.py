"""In which modules of a model positions meet: what calls them, and what they call, may treat each position alike."""

from contextlib import ExitStack

from torch import nn

from meshfit.axes.context.piece import gathered
from meshfit.comm.group import CountingGroup


class MeetingModules:
    """Modules in whose own code something is said to ``group``, or computed on wholes, while a step runs within."""

    def __init__(self, model: nn.Module, group: CountingGroup):
        self.found: dict[str, None] = {}
        self._model, self._group, self._hooks = model, group, ExitStack()
        self._running: list[tuple[int, int]] = []
        """Of each module that runs: how much had been said when it began, and by modules that it called since."""

    def __enter__(self) -> "MeetingModules":
        for path, module in self._model.named_modules():
            enter = lambda module, args: self._running.append((self._said(), 0))
            leave = lambda module, args, out, path=path: self._left(path)
            self._hooks.callback(module.register_forward_pre_hook(enter).remove)
            self._hooks.callback(module.register_forward_hook(leave).remove)
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.close()

    def _left(self, path: str) -> None:
        before, by_others = self._running.pop()
        said = self._said() - before
        if said > by_others:
            self.found[path] = None
        if self._running:
            start, inner = self._running[-1]
            self._running[-1] = start, inner + said

    def _said(self) -> int:
        return len(self._group.log) + sum(gathered.values())
