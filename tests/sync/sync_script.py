"""Scripts without an event loop, to be killed and interrupted: ``sync_script.py WHAT URL NAMESPACE FILE``."""

from __future__ import annotations

import os
import signal
import sys
import threading

from natsreceipts import AmbiguousCall, InvalidSetting, Landed, NotLanded, sync

WHAT, URL, NAMESPACE, FILE = sys.argv[1:]
LEASE = 0.6


def say(text: str) -> None:
    print(text, flush=True)


def effect() -> str:
    """The effect that is to happen once: a line in a file, on disk."""
    file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, b"effect\n")
    os.fsync(file)
    os.close(file)
    return "sent"


def looked_at() -> Landed | NotLanded:
    """Look at the outside world."""
    return Landed("sent") if os.path.exists(FILE) else NotLanded()


def killed_in_the_effect() -> str:
    effect()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def killed_before_the_effect() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def waits() -> None:
    say("begun")
    threading.Event().wait(60)


def forked(toolkit: sync.Toolkit, call: sync.Call) -> None:
    """Say what a child is told that uses what it was forked with, and leaves the call that it was forked in."""
    child = os.fork()
    if child == 0:
        for use in (lambda: toolkit.receipts.get(call.key), lambda: call.__exit__(None, None, None)):
            try:
                use()
            except InvalidSetting as error:
                say("refused" if "fork" in str(error) else str(error))
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    if WHAT == "exits":  # without closing, with a call open in a daemon thread and the context in no `with`
        toolkit = sync.connect(URL, namespace=NAMESPACE, provision=True).__enter__()
        begun = threading.Event()

        def body() -> None:
            begun.set()
            threading.Event().wait(60)

        run = toolkit.run("acme", "run-1")
        threading.Thread(target=lambda: run.execute("send", {}, body), daemon=True).start()
        begun.wait(60)
        say("ends")
        return
    with sync.connect(URL, namespace=NAMESPACE, provision=True) as toolkit:
        run = toolkit.run("acme", "run-1")
        try:
            match WHAT:
                case "body":
                    run.execute("send", {}, waits)
                case "wait":
                    say("begun")
                    run.execute("send", {}, waits, wait=60)
                case "watch":
                    for receipt in toolkit.receipts.watch():
                        say(receipt.status)
                case "killed-in":
                    run.execute("send", {}, killed_in_the_effect, lease=LEASE)
                case "killed-before":
                    run.execute("send", {}, killed_before_the_effect, lease=LEASE)
                case "fork":
                    with run.call("send", {}) as call:
                        forked(toolkit, call)
                        call.result = "the parent's"
                case "again":
                    say(run.execute("send", {}, effect))
                case "verified":
                    say(run.execute("send", {}, effect, verify=looked_at))
        except KeyboardInterrupt:
            receipt = toolkit.receipts.get(run.key("send", {}))
            error = receipt.error if receipt else None
            say(f"interrupted {receipt and receipt.status} {error and error.type}")
            raise
        except AmbiguousCall:
            say("ambiguous")


main()
