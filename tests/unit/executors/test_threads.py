"""File work that hangs takes nothing along."""

from __future__ import annotations

import asyncio
import threading

import pytest

from milepostd.executors.threads import Threads


def test_a_result_and_an_error_come_back() -> None:
    async def main() -> None:
        threads = Threads("t", 1)
        assert 5 == await threads.run(lambda: 5)
        with pytest.raises(OSError, match="gone"):
            await threads.run(lambda: (_ for _ in ()).throw(OSError("gone")))
        assert 6 == await threads.run(lambda: 6)

    asyncio.run(main())


def test_no_more_calls_run_at_once_than_permitted() -> None:
    async def main() -> None:
        threads, gate = Threads("t", 2), threading.Event()
        both = threading.Barrier(3, timeout=20)

        def call() -> bool:
            if not gate.is_set():
                both.wait()
            return gate.wait()

        running = [asyncio.create_task(threads.run(call)) for _ in range(3)]
        await asyncio.to_thread(both.wait)
        assert 2 == sum(thread.name == "t" for thread in threading.enumerate())
        gate.set()
        assert [True] * 3 == await asyncio.gather(*running)

    asyncio.run(main())


def test_an_abandoned_call_makes_room_and_still_ends() -> None:
    async def main() -> None:
        threads, gate = Threads("t", 1), threading.Event()
        is_hanging = threading.Event()

        def hang() -> bool:
            is_hanging.set()
            return gate.wait()

        hung = asyncio.create_task(threads.run(hang, "hung"))
        assert await asyncio.to_thread(is_hanging.wait, 20)
        waiting = asyncio.create_task(threads.run(lambda: "next"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        threads.abandon("hung")
        assert "next" == await waiting
        gate.set()
        assert await hung
        assert "one permit" == await threads.run(lambda: "one permit")

    asyncio.run(main())
