"""Bytes of bodies are counted while they are kept, and not after."""

import asyncio

from optimizer.harness.server.http.app import App, Security, _nothing


def test_a_body_whose_first_part_is_empty_is_given_back_once() -> None:
    async def run() -> None:
        app = App(Security(), lambda **_: None)
        exchange = app._exchange({"method": "POST", "path": "/", "headers": []}, _nothing)
        for size, held in ((0, 0), (3, 3), (0, 3), (2, 5)):
            exchange.hold(size)
            assert app.bodies.size == held
        exchange.leases.close()
        assert app.bodies.size == 0

    asyncio.run(run())
