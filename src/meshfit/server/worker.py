"""A worker of model servers: computes gradients, and lets the servers step.

An ``Exchange`` without an optimizer: ``ServerUpdate`` stands in for ``Update``. The servers hand out batches
(``ticket``), and say with whom each is shared (``share``): so a worker may come late, another may go, a server may be
started again, and every batch is still computed once.

    traffic   gradients up and weights down, each once a step: 2P bytes
    memory    weights and gradients, on this host shared with the servers; no optimizer state

``RepeatBatch`` says that the batch under way is to be computed again, with the weights and the share of that moment.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfit.axes.data.batchnorm import running_statistics
from meshfit.cost import Cost
from meshfit.errors import RankError
from meshfit.exchange.parcel import Parcel, shares
from meshfit.exchange.protocol import RepeatBatch, StepScalars
from meshfit.exchange.server_cost import Payload
from meshfit.exchange.server_cost import worker as worker_cost
from meshfit.exchange.update import Updated
from meshfit.server.connection import ServerConnection
from meshfit.server.snapshot import put_down
from meshfit.server.wire import ConnectionLost, Message

if TYPE_CHECKING:
    from meshfit.server.worker_group import WorkerGroup

PATIENCE = 60.0  # seconds for a server to be there again
BETWEEN_SECONDS = 0.002  # two looks at servers that are about to step


class Worker:
    """Worker ``id`` of the servers at ``addresses``. Blocks until all have answered, and takes their weights."""

    def __init__(
        self,
        model: nn.Module,
        addresses: Sequence[str],
        secret: bytes,
        *,
        id: int,
        device: torch.device | str = "cpu",
        staleness: float = 0,
        compress: str = "none",
        timeout: float = 600.0,
    ):
        """``timeout``: seconds without a word of a server that is to answer, be it that it waits for others."""
        self.id, self.timeout = id, timeout
        self.asynchronous, self.device = staleness != 0, torch.device(device)
        self.named = dict(model.named_parameters())
        self.parameters = [p for p in self.named.values() if p.requires_grad]
        self.samples = 0.0
        """Of this worker in the batch under way."""
        self.epoch, self.last = 0, False
        """Of that batch, and whether it ends one."""
        self.norm: Tensor | None = None
        """Of the gradients of all workers, as summed, after ``finish``."""
        self.staleness = 0
        """Of its last gradient: updates that came between."""
        self.taken, self.seen = 0, 0.0
        """The number of its last step, among the steps of all workers, and the samples that all have seen by then."""
        self.ticket: int | None = None
        """The batch to work on; None: all are done."""
        self.members = [id]
        """Workers that share it."""
        self.leader = id
        """The worker that does, of those at work, what one does for all."""
        self.at_work = False
        """Whether it is in the middle of a batch."""
        self.summed = True
        """Whether the sums are of all that shared the batch; False: one was lost, and left out."""
        self.sequence, self.again = 0, 0
        """Of its requests; and how often a batch had to be done again."""
        self.waits: Callable[[], object] = lambda: None
        """Called when a server says that it waits for others."""
        self._round, self._meetings, self._pushed = "", 0, False
        self._own = StepScalars()
        self._reached: set[Tensor] = set()
        self._payload = Payload.of(model, servers=len(addresses), compress=compress)
        self._hooks = [p.register_post_accumulate_grad_hook(self._reached.add) for p in self.parameters]
        how: dict[str, Any] = {"worker": id, "device": self.device, "compress": compress}
        self.connections = [
            ServerConnection(address, secret, owned, {} if i else running_statistics(model), **how)
            for i, (address, owned) in enumerate(zip(addresses, shares(model, len(addresses)), strict=True))
        ]
        try:
            for connection in self.connections:
                connection.connect(PATIENCE)
                connection.clear()
            self._ask_place()
        except BaseException:
            self.remove()
            raise

    def reach(self, names: Iterable[str]) -> None:
        """Their gradients were made, elsewhere."""
        self._reached.update(self.named[name] for name in names)

    @property
    def degree(self) -> int:
        """Workers that share a batch."""
        return len(self.members)

    @property
    def share(self) -> tuple[int, int]:
        """Which part of the batch is this worker's: (i, n), the i-th of n."""
        return self.members.index(self.id), len(self.members)

    @property
    def rank(self) -> int:
        return self.share[0]

    @property
    def learning_rate(self) -> float:
        return self.connections[0].learning_rate

    @property
    def parcels(self) -> list[Parcel]:
        """What each server owns."""
        return [connection.parcel for connection in self.connections]

    @property
    def version(self) -> int:
        return self.connections[0].version

    def cost(self) -> Cost:
        """Of a step."""
        return worker_cost(self._payload, device=self.device.type)

    # A step, as the loop sees it

    def arm(self, own: StepScalars) -> None:
        """The next backward is the last of this step."""
        self._own = own

    def finish(self) -> StepScalars:
        """Send the gradients; the sums over all workers."""
        own = self._own
        words: dict[str, Any] = {"loss": float(own.loss), "count": float(own.count), "stop": float(own.stop)}
        words |= {"broken": float(own.broken[0]), "values": [float(value) for value in own.values]}
        words |= {"samples": float(self.samples), "epoch": self.epoch, "last": self.last}
        words |= {"ticket": self.ticket, "members": self.members, "round": self._round}
        self.at_work = False
        self.sequence += 1
        self._pushed = True
        for connection in self.connections:
            connection.pack()
        answers = self._ask("push", [words | {"reached": self._mask(connection)} for connection in self.connections])
        replies = self._agreed(answers)
        self.norm = torch.tensor(math.sqrt(sum(each["square"] for each in replies)), dtype=torch.float64)
        first = replies[0]
        self.summed = len(first["summed"]) == len(self.members)
        return StepScalars(first["loss"], first["count"], first["stop"], first["broken"], first["values"])

    def meet(self, said: str) -> list[str]:
        """Say something to those that share the batch, in the middle of it; what each says, in their order."""
        self._meetings += 1
        answer = self._ask_first("meet", {"round": self._round, "number": self._meetings, "said": said})
        if answer.kind == "again":
            self._start_over()
        return answer.words["all"]

    def progress(self) -> None:
        """Let the servers know that this worker gets on; from any thread."""
        for connection in self.connections:
            connection.progress()

    def wait_for_earlier(self) -> bool:
        """At the end: wait until those before this worker are gone. Whether one of them had done all there was."""
        return self._ask_first("wait").words["done"]

    def _mask(self, connection: ServerConnection) -> str:
        """Which of the server's parameters got a gradient: a bit each, in hexadecimal."""
        bits = (connection.parameters[name] in self._reached for name in connection.parcel.names)
        return f"{sum(bit << i for i, bit in enumerate(bits)):x}"

    def _agreed(self, answers: list[Message]) -> list[dict[str, Any]]:
        """The replies, summed by all servers over the same workers: without one that a server has lost."""
        while True:
            if any(answer.kind == "again" for answer in answers):
                self._start_over()
            replies = [answer.words for answer in answers]
            common = [id for id in replies[0]["summed"] if all(id in each["summed"] for each in replies)]
            if all(each["summed"] == common for each in replies):
                return replies
            answers = self._ask("agree", [{"summed": common}] * len(self.connections))

    def step(self, loss: float, correction: float, norm: float) -> Updated:
        """Have the servers step, and take their weights."""
        words = {"loss": loss, "correction": correction, "norm": norm}
        in_turn = self.asynchronous and len(self.connections) > 1
        answers = self._ask("step", [words | {"pull": not in_turn or i == 0} for i, _ in enumerate(self.connections)])
        if any(answer.kind == "again" for answer in answers):
            self._start_over()
        if in_turn:  # the first server has held this worker back: the others' weights are taken after that
            self._ask("pull", [{}] * (len(self.connections) - 1), self.connections[1:])
        self._pushed = False
        first = answers[0].words
        self._take_place(first)
        self.staleness, self.taken, self.seen = first["staleness"], first["step"], first["seen"]
        for connection in self.connections:
            connection.settle(first["taken"])
        return Updated(first["norm"], first["taken"])

    @property
    def gradients(self) -> list[Tensor]:
        """None to scale here: the servers do."""
        return []

    def clear(self) -> None:
        """Forget the gradients. If they were sent, and no step followed, nobody steps, and the training ends."""
        if self._pushed:
            self._drop(stop=True)
        self.forget()

    def forget(self) -> None:
        """Forget gradients that were not sent."""
        self._reached.clear()
        for connection in self.connections:
            connection.clear()

    def remove(self) -> None:
        """Leave the servers, and the parameters as they were found."""
        for hook in self._hooks:
            hook.remove()
        for connection in self.connections:
            connection.send("leave", self.sequence)
            connection.release()

    def pull(self, *, averaged: bool = False) -> None:
        """Take the weights as they are now."""
        self._ask("pull", [{"averaged": averaged}] * len(self.connections))

    def state(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """What each server keeps: tensors and facts, as its snapshots hold them. For processes of one host."""
        return put_down(self.kept())

    def kept(self) -> list[Path]:
        """Folders in which each server has put down what it keeps now."""
        return [Path(answer.words["path"]) for answer in self._ask("state", [{}] * len(self.connections))]

    def stop(self) -> None:
        """Let the training end here, for all workers."""
        if self.ticket is not None:
            self._drop(stop=True)
            self.ticket = None

    # Asking

    def _ask_first(self, kind: str, words: dict[str, Any] | None = None) -> Message:
        return self._ask(kind, [words or {}], self.connections[:1])[0]

    def _ask(
        self, kind: str, words: list[dict[str, Any]], connections: list[ServerConnection] | None = None
    ) -> list[Message]:
        """Send to all, then receive from all."""
        connections = self.connections if connections is None else connections
        for connection, request in zip(connections, words, strict=True):
            connection.send(kind, self.sequence, request)
        return [self._answer(connection) for connection in connections]

    def _answer(self, connection: ServerConnection) -> Message:
        """To what a server was asked. A connection that broke is made anew, and the request sent again."""
        while True:
            try:
                return connection.recv(self.timeout, self.waits)
            except TimeoutError:
                raise RankError(
                    f"the server at {connection.address} has not answered for {self.timeout:g} s",
                    f"worker {self.id} asked at step {connection.version}; another worker may be hung",
                ) from None
            except ConnectionLost:
                self._reconnect(connection)
                connection.send_again()

    def _reconnect(self, connection: ServerConnection) -> None:
        """Reach a server again. One that was started anew is where its snapshot was: so are then all, and we."""
        try:
            if not connection.connect(PATIENCE):
                return
            for other in self.connections:
                if other is not connection:
                    other.connect(PATIENCE)
        except ConnectionLost as error:
            raise RankError(str(error), f"worker {self.id} was at step {self.version}") from None
        self._start_over()

    def _drop(self, *, stop: bool = False) -> None:
        self._pushed = False
        for connection in self.connections:
            connection.send("drop", self.sequence, {"stop": stop})

    def _start_over(self) -> None:
        """Void the batch under way; take the weights, and the place, that there are now."""
        self.again += 1
        self.at_work = False
        if self._pushed:
            for connection in self.connections:
                connection.settle(False)
        self._drop()
        self.forget()
        self.pull()
        self._ask_place()
        raise RepeatBatch

    def _ask_place(self) -> None:
        answer = self._ask_first("where")
        self._take_place(answer.words)
        if answer.version != self.version:  # others have stepped while this worker waited for its place
            self.pull()
        until = time.monotonic() + self.timeout
        while not self.asynchronous and len({connection.version for connection in self.connections}) > 1:
            if time.monotonic() > until:
                versions = ", ".join(str(connection.version) for connection in self.connections)
                raise RankError(f"the servers have not come to one step for {self.timeout:g} s", f"steps {versions}")
            time.sleep(BETWEEN_SECONDS)  # the first has stepped; the word to do so is on its way to the others
            self.pull()

    def _take_place(self, words: dict[str, Any]) -> None:
        self.ticket, self._round, self.leader = words["ticket"], words["round"], words["leader"]
        self._meetings = 0
        if self.ticket is not None:
            self.members = words["members"]


class ServerUpdate:
    """Stands where ``Update`` does: the step that a server takes."""

    scale = offload = None
    span = "exchange"

    def __init__(self, worker: "Worker | WorkerGroup", *, ema: bool = False):
        self.worker = worker
        self.scheduler: Any = None
        """As the servers' is when a checkpoint is saved."""
        self.average = ServerAverage(worker) if ema else None

    @property
    def learning_rate(self) -> float:
        return self.worker.learning_rate

    def settle(self) -> None:
        """The schedule is the servers'."""

    def __call__(
        self,
        gradients: list[Tensor],
        loss: Tensor | float,
        correction: Tensor | float = 1.0,
        norm: Any = None,
        *,
        last: bool = True,
        again: Any = None,
    ) -> Updated:
        assert self.worker.norm is not None
        return self.worker.step(float(loss), float(correction), float(self.worker.norm))


class ServerAverage:
    """The averaged weights, which the servers keep."""

    def __init__(self, worker: "Worker | WorkerGroup"):
        self.worker, self._swapped = worker, False
        self.held: dict[str, Tensor] = {}
        """By name, when they have been asked for."""

    @property
    def weights(self) -> list[Tensor]:
        """Of all parameters; where they are not here, copies of the weights themselves."""
        return [self.held.get(name, p.detach().clone()) for name, p in self.worker.named.items()]

    def update(self) -> None:
        """The servers do."""

    def swap(self) -> None:
        """Have the averaged weights in the model; call again to undo."""
        self._swapped = not self._swapped
        self.worker.pull(averaged=self._swapped)
