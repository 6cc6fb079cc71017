"""The event loop runs between two pieces of work."""

import asyncio

from optimizer.harness.server.scheduling.loop_pacing import LoopPacer


def test_pieces_that_come_at_once_run_in_their_order_in_a_turn_each() -> None:
    async def run() -> list[str]:
        turns, seen = LoopPacer(pause=False), list[str]()

        async def piece(name: str) -> None:
            await turns.turn()
            seen.append(name)

        async def others() -> None:
            for _ in range(12):
                seen.append("-")
                await asyncio.sleep(0)

        await asyncio.gather(others(), *(piece(n) for n in "abcd"))
        return seen

    seen = asyncio.run(run())
    assert [n for n in seen if n != "-"] == list("abcd")
    assert not any(pair in "".join(seen) for pair in ("ab", "bc", "cd"))


def test_a_piece_that_comes_alone_waits_for_no_turn() -> None:
    async def run() -> None:
        turns = LoopPacer(pause=True)
        for _ in range(3):
            alone = turns.turn()
            try:
                alone.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_piece_whose_client_left_leaves_its_turn_to_the_next() -> None:
    async def run() -> list[int]:
        turns, seen = LoopPacer(pause=True), list[int]()

        async def piece(number: int) -> None:
            await turns.turn()
            seen.append(number)

        pieces = [asyncio.create_task(piece(i)) for i in range(5)]
        await asyncio.sleep(0)
        pieces[2].cancel()
        await asyncio.gather(*pieces, return_exceptions=True)
        await asyncio.wait_for(turns.turn(), 1.0)
        return seen

    assert asyncio.run(run()) == [0, 1, 3, 4]
