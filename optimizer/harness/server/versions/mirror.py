"""Mirror traffic during a trial: a request that one version answered also goes to the other one.

The client's answer is not delayed; the mirrored request follows at the lowest priority. If the
other version has no time for it, or too many are in flight, it is counted as skipped. Runs on the
event loop; started by loader.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..refusals import DeadlineError, DrainingError, OverloadError, RequestError
from ..request import Request
from .trial import VersionTrial, answers_differ

if TYPE_CHECKING:
    from .versions import Served

MAX_IN_FLIGHT = 4  # mirrored requests
LAST = 99  # the lowest priority
CLIENT = "trial"
BUSY = (OverloadError, DeadlineError, DrainingError)


class Mirror:
    """Mirror of a server that sends requests to both versions of a trial and compares the answers.

    ended: function that is called once, when the trial is over
    """

    def __init__(
        self, old: Served, new: Served, trial: VersionTrial, ended: Callable[[], None]
    ) -> None:
        self.old, self.new, self.trial, self._ended = old, new, trial, ended
        self.tasks = set[asyncio.Task[None]]()

    def start(self) -> None:
        """Start to compare the answers of the model's served version and the new one."""
        self.old.service.on_answer = partial(self._ask, self.new)
        self.new.service.on_answer = partial(self._ask, self.old)

    def stop(self) -> None:
        """Stop comparing the answers of the model's two versions."""
        self.old.service.on_answer = self.new.service.on_answer = None

    def _ask(
        self,
        other: Served,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None,
        parameters: Mapping[str, Any] | None,
        answers: Any,
    ) -> None:
        """Send a request that one version of a model answered to the other version too.

        other: the other version
        answers: answers of the first version; None if it failed
        """
        if self.trial.over:
            return
        if len(self.tasks) >= MAX_IN_FLIGHT:
            self.new.service.engine.metrics.trial_skipped.add()
            return
        task = asyncio.create_task(self._compare(other, inputs, pairs, parameters, answers))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _compare(
        self,
        other: Served,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None,
        parameters: Mapping[str, Any] | None,
        answers: Any,
    ) -> None:
        metrics = self.new.service.engine.metrics
        others: Any = None
        with other.lease() as service:
            deadline = service.engine.clock() + service.timeout
            request = Request(client=CLIENT, deadline=deadline, priority=LAST)
            try:
                result = await service.engine.answer(inputs, pairs, request, parameters)
                others = result.answers
            except BUSY:
                metrics.trial_skipped.add()
                return
            except RequestError:
                if answers is None:  # both failed
                    return
        one = answers is None or others is None
        different = one or any(
            answers_differ(*both, self.trial.terms.cosine)
            for both in zip(answers, others, strict=True)
        )
        if self.trial.over:
            return
        metrics.trial_compared.add()
        metrics.trial_differing.add(float(different))
        if self.trial.add(different):
            self._ended()
