"""Receipts, sessions and notices without an event loop."""

from __future__ import annotations

import threading

import pytest

from natsreceipts import AlreadyConsumed, CallWithdrawn, InvalidSetting, sync


def test_receipts_are_read_listed_and_watched(run, toolkit):
    for n in range(3):
        run.execute("send", {"n": n}, lambda n=n: n)
    key = run.key("send", {"n": 1})
    receipt = toolkit.receipts.get(key)
    assert (receipt.result, receipt.status) == (1, "completed")
    assert [each.status for each in toolkit.receipts.history(key.kv_key)] == ["running", "completed"]
    assert len(toolkit.receipts.revisions(key)) == 2
    assert toolkit.receipts.payload(receipt, receipt.record.result) == 1
    assert toolkit.receipts.server_time().now >= receipt.updated
    assert sorted(each.result for each in toolkit.receipts.list(run="run-1")) == [0, 1, 2]
    assert list(toolkit.receipts.list(status="ambiguous")) == []
    watch = toolkit.receipts.watch(tool="send")
    assert {next(watch).result for _ in range(3)} == {0, 1, 2}
    run.execute("send", {"n": 3}, lambda: 3)
    assert [next(watch).status, next(watch).result] == ["running", 3]
    watch.close()
    assert list(watch) == []


def test_a_list_that_is_not_read_to_its_end_is_closed(run, toolkit):
    for n in range(3):
        run.execute("send", {"n": n}, lambda: 1)
    for receipt in toolkit.receipts.list():
        assert receipt.result == 1
        break
    assert threading.active_count() < 20


def test_a_session_is_woken(toolkit):
    @sync.tool
    def send(to: str) -> str:
        return f"to {to}"

    def calling(call_id, to):
        call = {"type": "toolCall", "id": call_id, "name": "send", "arguments": {"to": to}}
        return {"role": "assistant", "content": [call]}

    session = toolkit.sessions.open("acme", "chat-1", dialect="neutral")
    with toolkit.run("acme", "run-1") as run:
        session.append({"role": "user", "content": "Tell them."})
        entry = session.append(calling("c1", "ann"))
        assert send("ann") == "to ann"
        session.append(calling("c2", "bob"))
        report = session.wake(guarded=[send])
        assert report.recovered[0].text == "to ann"
        with pytest.raises(CallWithdrawn):
            run.execute("send", {"to": "bob"}, lambda: "late", entry=entry)
        assert session.entry_of("c2").run == "run-1"
        assert len(session.context().messages) == 5
        session.append(calling("c3", "cy"), run=run)
        session.suspend(["c3"])
        session.resume(["c3"])
        session.append_result("c3", "sent", run="run-1")
        session.compact({"role": "user", "content": "They were told."})
        session.branch(None)
        session.append({"role": "user", "content": "Anew."})
    assert len(session.load().entries) == 1
    assert next(session.watch()).message == {"role": "user", "content": "Tell them."}
    assert [each.session for each in toolkit.sessions.list()] == ["chat-1"]
    assert session.calls_in(calling("c9", "x"))[0].name == "send"
    assert sync.reconcile_interrupted_session(session).recovered == ()
    assert sync.append_interruption_marker(session, tool_use_in_flight=False)
    assert session.interrupt(tool_use_in_flight=False).marker_id
    with pytest.raises(InvalidSetting):
        session.append({"role": "user", "content": "?"}, run=toolkit.run("other", "run-1"))


def test_notices_are_filed_consumed_and_watched(run, toolkit):
    board = run.notices
    filed = board.file(step="s", request_id="q", addressee="planner", fact={"decision": "build", "outcome": "ok"})
    assert filed.created
    several = board.file(step="s", request_id="r", addressees=["a", "b"], fact={"decision": "build", "outcome": "ok"})
    assert [each.created for each in several] == [True, True]
    watch = board.watch(addressee="planner")
    notice = next(watch)
    assert notice.notice_id == filed.notice_id
    watch.close()
    assert board.read(addressee="planner", notice_id=filed.notice_id) == notice
    assert [each.notice_id for each in board.pending(addressee="planner")] == [filed.notice_id]
    assert board.consume(addressee="planner", notice_id=filed.notice_id, by="turn-1").by == "turn-1"
    with pytest.raises(AlreadyConsumed):
        board.consume(addressee="planner", notice_id=filed.notice_id, by="turn-2")
    assert board.unconsumed_steps() == {"s"}
    assert len(board.list_run()) == 3
    assert len(board.list(addressee="a")) == 1
    assert board.get(filed.key).consumed.by == "turn-1"
    assert len(toolkit.notices.at(board.endpoint).find(run="run-1")) == 3
    assert toolkit.notices.of("acme", "run-1").endpoint == board.endpoint
    assert "build" in board.render([notice])
