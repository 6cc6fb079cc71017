"""The speed of this machine is measured once, and threads share the work but not the memory."""

from __future__ import annotations

from optimizer.foundation.process import machine_speed
from optimizer.foundation.process.machine_speed import MachineSpeed


def test_the_machine_is_measured_once() -> None:
    speed = machine_speed.measure()
    assert min(speed.products, speed.values, speed.bytes, speed.digested) > 1e6
    assert speed.integers >= speed.products
    assert speed.interpreted > 1e4
    assert machine_speed.measure() is speed


def test_threads_share_the_work_but_not_the_memory() -> None:
    one, two = (
        MachineSpeed(
            products=10, integers=20, values=20, bytes=40, digested=5, interpreted=4, threads=n
        )
        for n in (1, 2)
    )
    assert (one.multiply(40), one.compute(40), one.move(40), one.digest(40)) == (4, 2, 1, 8)
    assert one.interpret(40) == two.interpret(40) == 10
    assert (two.multiply(40), two.compute(40), two.move(40), two.digest(40)) == (2, 1, 1, 8)
