"""More calls at once than anybody should make: none is lost or doubled, memory is bounded, errors say what they are."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import toolkit_of

from natsreceipts import NotClaimed
from natsreceipts.background import Door

CALLS = 10_000


@pytest.mark.faults
@pytest.mark.timeout(400)
async def test_ten_thousand_calls_at_once(server, namespace, bucket):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("many_calls.py")),
        server.url,
        namespace,
        str(CALLS),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    said = json.loads(out)
    print(said)
    tenth = CALLS // 10
    assert said["first"] == {"right": 8 * tenth, "NotApplied": tenth, "ConnectionResetError": tenth}
    assert said["again"] == {"right": 8 * tenth, "AmbiguousCall": tenth}
    assert said["statuses"] == {"completed": 8 * tenth, "failed": tenth, "ambiguous": tenth}
    assert (said["entered"], said["twice"]) == (CALLS, 0)
    assert said["megabytes"] < 400
    assert said["tasks"] < 30


@pytest.mark.faults
@pytest.mark.timeout(300)
async def test_more_calls_than_a_silent_server_takes(proxy, namespace, bucket):
    """Those that wait for the first ones are told with them, and not one round after the other."""
    async with toolkit_of(proxy.url, namespace) as toolkit:
        run = toolkit.run("acme", "silent")
        ran = []
        await proxy.stall("both")
        began = asyncio.get_running_loop().time()
        came = await asyncio.gather(
            *[run.execute("send", {"to": number}, _noted(ran, number)) for number in range(1500)],
            return_exceptions=True,
        )
        took = asyncio.get_running_loop().time() - began
        assert Counter(type(each) for each in came) == {NotClaimed: 1500}
        assert took < 100  # 12 rounds of 15 s would be 180
        await proxy.resume()
        assert await run.execute("send", {"to": "last"}, _noted(ran, "last")) == "last"
        assert ran == ["last"]


def _noted(ran, number):
    async def effect():
        ran.append(number)
        return number

    return effect


async def test_a_door_is_passed_in_order_and_by_so_many():
    door = Door(2, patience=30.0)
    inside, most, order = 0, 0, []

    async def go(number):
        nonlocal inside, most
        waited = await door.enter()
        assert waited == (number >= 2)
        inside += 1
        most = max(most, inside)
        order.append(number)
        await asyncio.sleep(0)
        inside -= 1
        door.leave(silent=False)

    await asyncio.gather(*[go(number) for number in range(20)])
    assert most == 2
    assert order == [*range(20)]


async def test_who_is_cancelled_before_a_door_keeps_nobody_out():
    door = Door(1, patience=30.0)
    await door.enter()
    waiting = [asyncio.create_task(door.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    door.leave(silent=False)
    waiting[1].cancel()
    await asyncio.wait(waiting[:2])
    assert await waiting[2]
    door.leave(silent=False)
    assert not await door.enter()


async def test_who_waited_too_long_behind_a_silent_server_is_turned_away():
    door = Door(1, patience=0.0)
    await door.enter()
    waiting = [asyncio.create_task(door.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    door.leave(silent=True)
    for each in waiting:
        with pytest.raises(TimeoutError):
            await each
    assert not await door.enter()
    late = asyncio.create_task(door.enter())
    await asyncio.sleep(0)
    door.leave(silent=False)
    assert await late
